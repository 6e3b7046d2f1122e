"""A flag that travels beside a number in its reduction."""

import torch

from nanoladder.parallel import LaggedFlag, flag


def test_a_flag_of_any_process_is_seen_after_a_step_that_began_with_it():
    ours = LaggedFlag()

    def step(before, meanwhile):
        """A step of two processes. before, meanwhile: if the other has raised its flag in each reduction."""
        for number, raised in ((torch.tensor(1024), before), (torch.tensor(2.5), meanwhile)):
            other = torch.stack([number, torch.full_like(number, raised)])
            assert flag.taken_from((flag.beside(number) + other) / 2) == number
        return ours()

    assert not step(False, False)
    assert not step(False, True)
    assert step(True, True)
    ours.is_raised = True
    assert step(False, False)
