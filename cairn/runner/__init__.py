"""From a StepPlan to a StepResult: tensors, no policy."""
