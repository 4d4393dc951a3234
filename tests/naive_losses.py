"""Every loss of the family in float64, row by row, written from the paper's formulas.

A loss is a function of a row's cosines z (K,), its label y and its negatives. Gradients are central
differences in z, carried over to embeddings and class weights by the cosine's own derivative.
"""

from __future__ import annotations

import inspect

import numpy as np

STEP = 1e-6


def psi(theta, m1):
    """SphereFace's continuation of cos(m1 θ)."""
    k = np.floor(m1 * theta / np.pi)
    k = min(k, np.ceil(m1) - 1)
    return (-1) ** k * np.cos(m1 * theta) - 2 * k


def arc(z, m2):
    theta = np.arccos(np.clip(z, -1, 1))
    return np.cos(theta + m2) if theta + m2 < np.pi else z - m2 * np.sin(m2)


def combined(z, m1, m2, m3):
    if m1 == 1:
        return arc(z, m2) - m3
    angle = m1 * np.arccos(np.clip(z, -1, 1)) + m2
    k = np.floor(angle / np.pi)
    return (-1) ** k * np.cos(angle) - 2 * k - m3


def log_one_plus_sum(exponents):
    """log(1 + Σ e^a), without overflow."""
    exponents = np.append(np.asarray(exponents, float), 0.0)
    top = exponents.max()
    return top + np.log(np.exp(exponents - top).sum())


def entangled(target):
    """log(1 + Σ e^{s z_k} / e^{s φ(z_y)}), of φ as a function of z_y and options."""

    def loss(z, y, negatives, offset, s, **options):
        phi = target(z[y], **options)
        return log_one_plus_sum([s * z[k] + offset[k] - s * phi for k in negatives])

    return loss, options_of(target, after=1)


def dsoftmax(z, y, negatives, offset, s, d, inter_weight=1.0):
    """log(1 + ε / e^{s z_y}) + log(1 + Σ e^{s z_k}), ε = e^{s d}."""
    inter = log_one_plus_sum([s * z[k] + offset[k] for k in negatives])
    return log_one_plus_sum([s * d - s * z[y]]) + inter_weight * inter


def dissected_with(target):
    """D-Softmax's intra part, and a softmax whose z_y is a constant for the gradient."""

    def loss(z, y, negatives, offset, s, d, constant_z_y, **options):
        phi = target(constant_z_y, **options)
        inter = log_one_plus_sum([s * z[k] + offset[k] - s * phi for k in negatives])
        return log_one_plus_sum([s * d - s * z[y]]) + inter

    return loss, ["d", "constant_z_y", *options_of(target, after=1)]


def options_of(function, after):
    return list(inspect.signature(function).parameters)[after:]


# The twin of each criterion, by the name of its class: the loss of a row, and its options.
TWINS = {
    "Softmax": entangled(lambda z: z),
    "SphereFace": entangled(lambda z, m1, lam: (lam * z + psi(np.arccos(z), m1)) / (1 + lam)),
    "CosFace": entangled(lambda z, m3: z - m3),
    "ArcFace": entangled(arc),
    "Combined": entangled(combined),
    "AdaFace": entangled(
        lambda z, m, q: np.cos(np.clip(np.arccos(z) - m * q, 0, np.pi)) - m - m * q
    ),
    "DSoftmax": (dsoftmax, options_of(dsoftmax, after=5)),
    "DSoftmaxSoftmax": dissected_with(lambda z: z),
    "DSoftmaxArcFace": dissected_with(arc),
}


def annealing(x, annealing, m1, **_):
    """SphereFace's λ of the first step."""
    return [{"lam": 1000.0 if (m1 > 2 if annealing is None else annealing) else 0.0}] * len(x)


def quality(x, h, **_):
    """AdaFace's measure of quality, of the first step."""
    norm = np.linalg.norm(x, axis=1).clip(0.001, 100)
    mean, deviation = 20 + 0.01 * (norm.mean() - 20), 100 + 0.01 * (norm.std() - 100)
    return [{"q": q} for q in (h * (norm - mean) / (deviation + 0.001)).clip(-1, 1)]


# What a twin needs of each row beside its cosines, by the name of the criterion.
ARGUMENTS = {"SphereFace": annealing, "AdaFace": quality}


def cosines(x, weights, normalize):
    if not normalize:
        return weights @ x
    lengths = np.linalg.norm(weights, axis=1) * np.linalg.norm(x)
    return np.clip(weights @ x / np.where(lengths > 0, lengths, 1), -1, 1)


def compute(name, x, weights, labels, negatives, offset, options):
    """Return the losses (B,) and the gradients of their sum, (B, D) and (K, D).

    Parameters
    ----------
    name : str
        Of the criterion's class.
    x, weights, labels : (B, D), (K, D), (B,)
    negatives : list of list of int
        The classes per row.
    offset : (K,)
        Added to the logits of the negatives.
    options : dict
        All options of the loss; the twin takes those it has.
    """
    x, weights = np.asarray(x, float), np.asarray(weights, float)
    losses, to_x, to_weights = np.zeros(len(x)), np.zeros_like(x), np.zeros_like(weights)
    twin, wanted = TWINS[name]
    normalize = options["normalize"]
    per_row = ARGUMENTS[name](x, **options) if name in ARGUMENTS else [{}] * len(x)
    for row, (label, of_row) in enumerate(zip(labels, negatives)):
        z = cosines(x[row], weights, normalize)
        known = {**options, **per_row[row], "constant_z_y": z[label]}
        known = {key: known[key] for key in wanted if key in known}

        def loss(z, label=label, of_row=of_row, known=known):
            return twin(z, label, of_row, offset, options["scale"], **known)

        losses[row] = loss(z)
        for k in {label, *of_row}:
            shift = np.eye(len(z))[k]
            up, down = z[k] + STEP, z[k] - STEP
            if normalize:  # at the ends of [-1, 1] a one-sided difference
                up, down = min(up, 1), max(down, -1)
            slope = (loss(z + shift * (up - z[k])) - loss(z + shift * (down - z[k]))) / (up - down)
            jacobian_x, jacobian_w = cosine_gradients(x[row], weights[k], normalize)
            to_x[row] += slope * jacobian_x
            to_weights[k] += slope * jacobian_w
    return losses, to_x, to_weights


def cosine_gradients(x, w, normalize):
    if not normalize:
        return w, x
    length_x, length_w = np.linalg.norm(x), np.linalg.norm(w)
    if length_x == 0 or length_w == 0:  # no direction: cosine 0, gradient 0
        return np.zeros_like(x), np.zeros_like(w)
    x, w = x / length_x, w / length_w
    return (w - (x @ w) * x) / length_x, (x - (x @ w) * w) / length_w
