"""Tools that measure, predict, replay and show the training loop. Not here: anything that training needs.

Private APIs of PyTorch stand where they are used: tools that trace a step from within have no others.
"""
