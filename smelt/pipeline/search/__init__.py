"""Search for the settings of a recipe: the space, the study of trials, and its report."""
