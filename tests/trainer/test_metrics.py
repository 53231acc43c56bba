"""Metrics of several optimizer steps in one row."""

from lightningrl.trainer.metrics import over_minibatches


def test_a_skipped_step_counts_only_where_it_has_a_figure() -> None:
    learnt = {"loss/value": 0.5, "optim/skipped": 0.0, "optim/steps": 1.0, "tokens/terms": 3.0, "loss/ratio_max": 2.0}
    skipped = {"optim/skipped": 1.0, "optim/steps": 1.0}
    expected = learnt | {"optim/skipped": 0.5}
    assert over_minibatches([learnt, skipped]) == over_minibatches([skipped, learnt]) == expected
