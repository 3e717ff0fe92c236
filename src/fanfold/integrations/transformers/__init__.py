"""fanfold inside transformers."""
