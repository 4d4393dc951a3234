"""What the tests of the commands in eval/ share."""

import pytest

from dsoftmax.eval import plots


@pytest.fixture
def no_figures(monkeypatch):
    """Skip the figures, which take most of a command's time, in tests of something else."""
    monkeypatch.setattr(plots, "save_both", lambda figure, stem: None)
