"""The training program: it turns a recipe into a trained model and a self-explanatory folder."""
