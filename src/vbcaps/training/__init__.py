"""The training program: from a recipe to a folder that explains itself."""
