"""Tools that measure, predict, replay and show the training loop. Not here: anything that training needs."""
