"""The main job in one room: a real document, hidden facts, questions, answers, and their cost."""
