"""Every metric against a brute-force twin, in odd cases, and under changes it must not see."""

import math

import numpy as np
import pytest
from naive_metrics import naive_fold_accuracy

from dsoftmax.eval import metrics


def scores_of(rng, genuine=40, impostor=60, digits=1):
    """Return scores with many ties."""
    return (
        np.round(rng.normal(1, 1, genuine), digits),
        np.round(rng.normal(0, 1, impostor), digits),
    )


class TestFoldAccuracy:
    @pytest.mark.parametrize(("count", "folds"), [(60, 10), (23, 4), (7, 7)])
    def test_against_the_protocol_spelled_out(self, count, folds, rng):
        is_same = rng.random(count) < 0.5
        distances = np.clip(np.where(is_same, 1.2, 1.7) + rng.normal(0, 0.4, count), 0, 4)
        found = metrics.fold_accuracy(distances, is_same, folds)
        assert (found.mean, found.deviation) == pytest.approx(
            naive_fold_accuracy(distances, is_same, folds)
        )
        assert found.mean == pytest.approx(found.accuracies.mean())
        assert len(found.thresholds) == folds

    def test_perfect_and_hopeless(self):
        is_same = np.tile([True, False], 30)
        assert metrics.fold_accuracy(np.where(is_same, 0.5, 2.5), is_same).mean == 1
        assert metrics.fold_accuracy(np.ones(60), is_same).mean == pytest.approx(0.5, abs=0.1)

    def test_all_same_or_all_different(self):
        for answer in (True, False):
            found = metrics.fold_accuracy(np.full(30, 0.7), np.full(30, answer))
            assert found.mean == 1

    def test_fewer_pairs_than_folds(self):
        found = metrics.fold_accuracy(np.array([0.1, 3.0, 0.2]), np.array([True, False, True]))
        assert len(found.accuracies) == 3

    def test_what_cannot_be_validated(self):
        with pytest.raises(ValueError, match="at least two pairs"):
            metrics.fold_accuracy(np.ones(1), np.ones(1, bool))
        with pytest.raises(ValueError, match="do not belong"):
            metrics.fold_accuracy(np.ones(3), np.ones(4, bool))
        with pytest.raises(ValueError, match="1 of 3 scores are NaN"):
            metrics.fold_accuracy(np.array([1, np.nan, 2]), np.ones(3, bool))


class TestAtFar:
    def test_against_trying_every_threshold(self, rng):
        for _ in range(20):
            genuine, impostor = scores_of(rng)
            fars = [0, 1e-4, 1 / 60, 0.05, 0.1, 0.5, 0.99, 1]
            for far, found in zip(fars, metrics.at_far(genuine, impostor, fars)):
                thresholds = [-math.inf, *np.unique(np.concatenate([genuine, impostor]))]
                legal = [t for t in thresholds if np.mean(impostor > t) <= far + 1e-12]
                expected = min(legal)
                assert found.tar == np.mean(genuine > expected)
                assert found.far == np.mean(impostor > expected) <= far + 1e-12
                assert np.mean(genuine > found.threshold) == found.tar

    def test_monotone(self, rng):
        genuine, impostor = scores_of(rng, digits=3)
        points = metrics.at_far(genuine, impostor, np.linspace(0, 1, 50))
        assert (np.diff([point.tar for point in points]) >= 0).all()
        assert (np.diff([point.threshold for point in points]) <= 0).all()

    def test_order_does_not_matter(self, rng):
        genuine, impostor = scores_of(rng)
        one = metrics.at_far(genuine, impostor, [0.01, 0.1])
        assert one == metrics.at_far(
            rng.permutation(genuine), rng.permutation(impostor), [0.01, 0.1]
        )

    def test_a_tie_with_a_refused_impostor_is_refused(self):
        (point,) = metrics.at_far(np.array([0.5, 0.6]), np.array([0.5, 0.1]), [0])
        assert point == (0.5, 0.5, 0)

    def test_floating_point_takes_no_impostor_away(self):
        (point,) = metrics.at_far(np.ones(1), np.arange(10) / 10, [0.1 + 0.2 - 0.2])
        assert point.far == 0.1

    def test_degenerate(self):
        assert math.isnan(metrics.at_far(np.ones(0), np.ones(3), [0.1])[0].tar)
        assert metrics.at_far(np.ones(3), np.ones(3), [0.5])[0].tar == 0
        assert metrics.at_far(np.ones(3), np.ones(3), [1])[0].tar == 1
        with pytest.raises(ValueError, match="no false accept rate"):
            metrics.at_far(np.ones(3), np.ones(0), [0.1])
        with pytest.raises(ValueError, match="NaN"):
            metrics.at_far(np.array([np.nan]), np.ones(2), [0.1])


class TestFoldTar:
    def test_against_folds_spelled_out(self, rng):
        scores = np.round(rng.normal(size=90), 1)
        is_same = np.tile([True, False, False, True, False, True, False, False, False], 10)
        scores[is_same] += 1.5
        tars, fars = [], []
        for fold in range(10):
            test = np.zeros(90, bool)
            test[9 * fold : 9 * fold + 9] = True
            others = np.sort(scores[~test & ~is_same])[::-1]
            threshold = others[int(0.1 * len(others))]
            tars.append(np.mean(scores[test & is_same] > threshold))
            fars.append(np.mean(scores[test & ~is_same] > threshold))
        found = metrics.fold_tar(scores, is_same, 0.1)
        assert found == pytest.approx((np.mean(tars), np.std(tars), np.mean(fars)))

    def test_folds_of_one_kind_do_not_count(self):
        is_same = np.arange(20) < 10  # in order: the first folds have no impostors
        found = metrics.fold_tar(np.where(is_same, 1.0, 0.0), is_same, 0.1)
        assert found == (1, 0, 0)

    def test_only_one_kind_at_all(self):
        assert math.isnan(metrics.fold_tar(np.arange(9.0), np.zeros(9, bool), 0.1, 3).mean)
        assert metrics.fold_tar(np.arange(9.0), np.ones(9, bool), 0.1, 3).mean == 1


class TestRoc:
    def test_against_trying_every_threshold(self, rng):
        genuine, impostor = scores_of(rng)
        curve = metrics.roc(genuine, impostor)
        assert curve.thresholds[0] == np.inf
        for threshold, far, tar in zip(*curve):
            assert far == pytest.approx(np.mean(impostor >= threshold))
            assert tar == pytest.approx(np.mean(genuine >= threshold))
        assert (curve.far[-1], curve.tar[-1]) == (1, 1)

    def test_area_is_the_chance_to_be_right(self, rng):
        genuine, impostor = scores_of(rng)
        chances = [(g > i) + 0.5 * (g == i) for g in genuine for i in impostor]
        assert metrics.roc(genuine, impostor).auc == pytest.approx(np.mean(chances))

    def test_equal_error_rate(self, rng):
        genuine, impostor = np.array([1.0, 2, 3, 4]), np.array([0.0, 1.5, 0.5, 0.2])
        assert metrics.roc(genuine, impostor).eer == pytest.approx(0.25)
        assert metrics.roc(genuine, genuine).eer == pytest.approx(0.5)
        assert metrics.roc(np.array([2.0]), np.array([1.0])).eer == 0
        assert metrics.roc(np.array([1.0]), np.array([2.0])).eer == 1
        far_apart = rng.normal(2, 1, 20000), rng.normal(0, 1, 20000)
        assert metrics.roc(*far_apart).eer == pytest.approx(0.1587, abs=0.01)  # Φ(-1)

    def test_one_kind_is_no_curve(self):
        with pytest.raises(ValueError, match="same and pairs of different"):
            metrics.roc(np.ones(3), np.ones(0))


class TestIdentify:
    def test_against_a_sorted_list(self, rng):
        for _ in range(10):
            scores = np.round(rng.normal(size=(30, 12)), 1)
            probe_ids, gallery_ids = rng.integers(0, 8, 30), rng.integers(0, 6, 12)
            found = metrics.identify(scores, probe_ids, gallery_ids)
            ranks, mates, best = [], [], []
            for row, person in zip(scores, probe_ids):
                own = [s for s, other in zip(row, gallery_ids) if other == person]
                if not own:
                    best.append(max(row))
                    continue
                others = [s for s, other in zip(row, gallery_ids) if other != person]
                # A list sorted by score, strangers first among equals.
                ranked = sorted([(-s, 0) for s in others] + [(-max(own), 1)])
                ranks.append(ranked.index((-max(own), 1)) + 1)
                mates.append(max(own))
            assert found.ranks.tolist() == ranks
            assert found.mate_scores.tolist() == mates
            assert found.other_scores.tolist() == best
            assert found.cmc(12) == pytest.approx([found.rank_rate(k) for k in range(1, 13)])
            for fpir in (0, 0.1, 0.3):
                if not best:
                    continue
                (point,) = found.at_fpir([fpir])
                assert np.mean(np.array(best) > point.threshold) <= fpir
                right = [r == 1 and m > point.threshold for r, m in zip(ranks, mates)]
                assert point.tar == pytest.approx(np.mean(right))

    def test_without_mates_or_strangers(self, rng):
        found = metrics.identify(rng.normal(size=(3, 4)), np.array([7, 8, 9]), np.arange(4))
        assert math.isnan(found.rank_rate(1))
        assert found.cmc(3).tolist() == [0, 0, 0]
        found = metrics.identify(np.eye(3), np.arange(3), np.arange(3))
        assert found.rank_rate(1) == 1
        with pytest.raises(ValueError, match="no false accept rate"):
            found.at_fpir([0.1])


def test_rotation_changes_nothing(rng):
    vectors = rng.normal(size=(40, 6))
    rotation, _ = np.linalg.qr(rng.normal(size=(6, 6)))
    plain, turned = (
        metrics.squared_distances(metrics.normalized(v)) for v in (vectors, 3 * vectors @ rotation)
    )
    np.testing.assert_allclose(plain, turned, atol=1e-12)


def test_embeddings_without_a_direction():
    unit = metrics.normalized(np.array([[0.0, 0], [3, 4]]))
    np.testing.assert_allclose(unit, [[0, 0], [0.6, 0.8]])
    with pytest.raises(ValueError, match=r"2 of 3 embeddings hold NaN or infinite.*number 1"):
        metrics.normalized(np.array([[1.0, 0], [np.nan, 0], [np.inf, 1]]))


class TestKnowingTheHighestOnly:
    def test_as_good_as_knowing_all(self, rng):
        genuine, impostor = scores_of(rng)
        highest = np.sort(impostor)[-20:]
        fars = [0, 0.01, 0.1, 0.3]
        assert metrics.at_far(genuine, highest, fars, total=60) == (
            metrics.at_far(genuine, impostor, fars)
        )

    def test_too_few_are_refused(self):
        with pytest.raises(ValueError, match="20 of 60 scores are too few for the rate"):
            metrics.at_far(np.ones(3), np.arange(20), [0.1, 0.5], total=60)


class TestCalibration:
    def test_intervals_hold_the_truth_as_often_as_they_say(self, rng):
        """Scores are uniform, so the true threshold of a rate is one minus it."""
        held = {0.2: 0, 0.02: 0}
        rounds = 400
        for _ in range(rounds):
            genuine, impostor = rng.random(50) + 0.1, rng.random(300)
            for found in metrics.calibrate(genuine, impostor, list(held)):
                held[found.far] += found.threshold.low <= 1 - found.far <= found.threshold.high
                assert found.threshold.low <= found.point.threshold <= found.threshold.high
        for count in held.values():  # 95 % or a little more; four deviations are 4.4 %
            assert count / rounds >= 0.906

    def test_rates_too_small_for_the_pairs(self):
        (found,) = metrics.calibrate(np.full(10, 2.0), np.linspace(0, 1, 50), [1e-3])
        assert found.threshold.high == math.inf
        assert found.pairs_needed == 1000
        assert found.point == (1.0, 1.0, 0.0)

    def test_share_interval(self):
        low, high = metrics.share_interval(0, 10)  # the textbook's: 0 of 10, up to 30.8 %
        assert low == 0
        assert high == pytest.approx(0.3085, abs=1e-4)
        low, high = metrics.share_interval(10, 10)
        assert (low, high) == (pytest.approx(0.6915, abs=1e-4), 1)
        low, high = metrics.share_interval(15, 20)
        assert (low, high) == (pytest.approx(0.5090, abs=1e-4), pytest.approx(0.9134, abs=1e-4))
        assert metrics.share_interval(0, 0) == (0, 1)


class TestIntervalsByPeople:
    def test_against_people_drawn_by_hand(self, rng):
        """Pairs are copied as often as their people come up."""
        people = np.array([[a, b] for a in range(12) for b in range(a, 12)])
        is_same = people[:, 0] == people[:, 1]
        scores = rng.normal(size=len(people)) + rng.normal(size=12)[people].sum(axis=1) + is_same
        (found,) = metrics.calibrate(scores[is_same], scores[~is_same], [0.2])
        (widened,) = metrics.widen_by_people([found], scores, is_same, people)
        same_draws = np.random.default_rng(0)
        thresholds, tars = [], []
        for _ in range(metrics.PEOPLE_DRAWS):
            drawn = same_draws.integers(12, size=12).tolist()
            genuine, impostor = [], []
            for (a, b), score in zip(people.tolist(), scores):
                times = drawn.count(a) * (drawn.count(b) if a != b else 1)
                (genuine if a == b else impostor).extend([score] * times)
            if impostor:  # else the same person came up twelve times
                thresholds.append(metrics.at_far([], impostor, [0.2])[0].threshold)
            tars.append(np.mean(np.array(genuine) > found.point.threshold))
        for name, values in (("threshold", thresholds), ("tar", tars)):
            outside = len(values) // 40
            by_hand = sorted(values)[outside], sorted(values)[-1 - outside]
            by_pairs = getattr(found, name)
            expected = min(by_hand[0], by_pairs[0]), max(by_hand[1], by_pairs[1])
            np.testing.assert_allclose(getattr(widened, name), expected)
        assert widened.threshold != found.threshold

    def test_pairs_of_the_same_people_are_no_news(self, rng):
        """How easy a person is decides all ten pairs: intervals by pairs miss the truth."""
        held = {"pairs": 0, "people": 0}
        rounds = 100
        people = np.repeat(np.arange(40), 10)[:, None].repeat(2, axis=1)
        for _ in range(rounds):
            is_hit = np.repeat(rng.random(40) < 0.7, 10)
            for name, interval in (
                ("pairs", metrics.share_interval(int(is_hit.sum()), 400)),
                ("people", metrics.share_interval_by_people(is_hit, people)),
            ):
                held[name] += interval.low <= 0.7 <= interval.high
        assert held["people"] >= 85
        assert held["pairs"] < 70

    def test_never_narrower_than_by_pairs(self):
        people = np.array([["ann", "ann"], ["bo", "bo"], ["cy", "cy"]])
        assert metrics.share_interval_by_people(np.ones(3, bool), people) == (
            metrics.share_interval(3, 3)
        )
        assert metrics.share_interval_by_people(np.ones(0, bool), people[:0]) == (0, 1)
