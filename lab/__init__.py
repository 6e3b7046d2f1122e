"""Tools that measure, predict, replay, show and export what the loop trains. Not here: anything that training needs.

Private APIs of PyTorch stand where they are used: tools that trace a step from within have no others.
"""
