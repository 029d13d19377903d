"""What a saved model was conditioned on, as its training wrote it down."""

CONDITION_FILE = "condition.json"
