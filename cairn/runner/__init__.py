"""Runs a StepPlan on the device and returns a StepResult. No scheduling policy here."""
