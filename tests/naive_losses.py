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


def sphereface_r(z, y, negatives, offset, s, m1, constant_z_y):
    """φ = cos(min(m, π / θ) θ), the difference to cos θ being a constant for the gradient."""
    theta = np.arccos(constant_z_y)
    phi = z[y] + (np.cos(min(m1 * theta, np.pi)) - constant_z_y)
    return log_one_plus_sum([s * (z[k] - phi) + offset[k] for k in negatives])


def magface(z, y, negatives, offset, s, l_a, u_a, l_m, u_m, regularizer, length):
    """Eq. 6 and 7 of the paper: cos(θ + m(a)), m linear, and λ g(a)."""
    a = np.clip(length, l_a, u_a)
    phi = arc(z[y], (u_m - l_m) / (u_a - l_a) * (a - l_a) + l_m)
    margin_loss = log_one_plus_sum([s * (z[k] - phi) + offset[k] for k in negatives])
    return margin_loss + regularizer * (a / u_a**2 + 1 / a)


def dsoftmax_learned(z, y, negatives, offset, s, m, b, inter_weight=1.0):
    """D-Softmax with one learned threshold b: d = m + b / s, and e^b in the place of the 1."""
    inter = log_one_plus_sum([s * z[k] - b + offset[k] for k in negatives])
    return log_one_plus_sum([s * (m + b / s) - s * z[y]]) + inter_weight * inter


def mv_softmax(z, y, negatives, offset, s, m2, m3, t):
    """Eq. 8 of the paper: e^{s z_k} times e^{s (t - 1) (z_k + 1)} if sample y is mis-classified."""
    phi = arc(z[y], m2) - m3
    logits = [s * z[k] + s * (t - 1) * (z[k] + 1) * (z[k] > phi) for k in negatives]
    return log_one_plus_sum([a + offset[k] - s * phi for a, k in zip(logits, negatives)])


def curricularface(z, y, negatives, offset, s, m2, t):
    """N(t, z_k) = z_k (t + z_k) if cos(θ_y + m) < z_k."""
    phi = arc(z[y], m2)
    hardened = [z[k] * (t + z[k]) if z[k] > phi else z[k] for k in negatives]
    return log_one_plus_sum([s * (a - phi) + offset[k] for a, k in zip(hardened, negatives)])


def circle(z, y, negatives, offset, s, m, constant_z):
    """Log(1 + Σ e^{γ α_n (s_n - Δ_n)} e^{-γ α_p (s_p - Δ_p)}), the weights α being constants."""
    weight = {k: max(constant_z[k] + m, 0) for k in negatives}
    positive = s * max(1 + m - constant_z[y], 0) * (z[y] - (1 - m))
    return log_one_plus_sum([s * weight[k] * (z[k] - m) + offset[k] - positive for k in negatives])


def uniface(z, y, negatives, offset, s, m, b, inter_weight=1.0):
    """log(1 + e^{-s (z_y - m) + b}) + Σ log(1 + e^{s z_k - b})."""
    inter = sum(np.exp(offset[k]) * np.logaddexp(0, s * z[k] - b) for k in negatives)
    return np.logaddexp(0, b - s * (z[y] - m)) + inter_weight * inter


def sphereface2(z, y, negatives, offset, s, m, t, alpha, b, inter_weight=1.0):
    """The paper's equation 5, times s."""

    def g(cosine):
        return 2 * ((cosine + 1) / 2) ** t - 1

    terms = [np.exp(offset[k]) * np.logaddexp(0, s * (g(z[k]) + m) + b) for k in negatives]
    intra = np.logaddexp(0, -s * (g(z[y]) - m) - b)
    return alpha * intra + (1 - alpha) * inter_weight * sum(terms)


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
    "SphereFaceR": (sphereface_r, options_of(sphereface_r, after=5)),
    "MagFace": (magface, options_of(magface, after=5)),
    "MVSoftmax": (mv_softmax, options_of(mv_softmax, after=5)),
    "CurricularFace": (curricularface, options_of(curricularface, after=5)),
    "Circle": (circle, options_of(circle, after=5)),
    "UniFace": (uniface, options_of(uniface, after=5)),
    "SphereFace2": (sphereface2, options_of(sphereface2, after=5)),
    "DSoftmax": (dsoftmax, options_of(dsoftmax, after=5)),
    "DSoftmax learned": (dsoftmax_learned, options_of(dsoftmax_learned, after=5)),
    "DSoftmaxSoftmax": dissected_with(lambda z: z),
    "DSoftmaxArcFace": dissected_with(arc),
}


# What a twin needs beside a row's cosines and the options. The functions are given the embeddings,
# the cosines with the own classes, the number of negatives and the options, and return it per row.


def annealing(x, z_y, count, annealing, m1, **_):
    """SphereFace's λ of the first step."""
    return [{"lam": 1000.0 if (m1 > 2 if annealing is None else annealing) else 0.0}] * len(x)


def quality(x, z_y, count, h, **_):
    """AdaFace's measure of quality, of the first step."""
    norm = np.linalg.norm(x, axis=1).clip(0.001, 100)
    mean, deviation = 20 + 0.01 * (norm.mean() - 20), 100 + 0.01 * (norm.std() - 100)
    return [{"q": q} for q in (h * (norm - mean) / (deviation + 0.001)).clip(-1, 1)]


def progress(x, z_y, count, forget, **_):
    """CurricularFace's t of the first step."""
    return [{"t": forget * np.mean(z_y)}] * len(x)


def threshold(x, z_y, count, b, **_):
    """UniFace's b before the first step."""
    return [{"b": np.log(10 * max(count, 1)) if b is None else b}] * len(x)


def balance(x, z_y, count, scale, m, t, alpha, b, **_):
    """SphereFace2's b before the first step: that of equal slopes at z = 0, by bisection."""
    if b is None:
        g = 2 * 0.5**t - 1
        low, high = -500.0, 500.0
        for _ in range(200):
            b = (low + high) / 2
            to_positive = alpha / (1 + np.exp(scale * (g - m) + b))
            to_negatives = (1 - alpha) * max(count, 1) / (1 + np.exp(-scale * (g + m) - b))
            low, high = (b, high) if to_positive > to_negatives else (low, b)
    return [{"b": b}] * len(x)


def log_count(x, z_y, count, **_):
    """D-Softmax's learned b before the first step."""
    return [{"b": np.log(max(count, 1))}] * len(x)


ARGUMENTS = {
    "SphereFace": annealing,
    "AdaFace": quality,
    "CurricularFace": progress,
    "DSoftmax learned": log_count,
    "UniFace": threshold,
    "SphereFace2": balance,
}


def cosines(x, weights, normalize):
    if not normalize:
        return weights @ x
    lengths = np.linalg.norm(weights, axis=1) * np.linalg.norm(x)
    return np.clip(weights @ x / np.where(lengths > 0, lengths, 1), -1, 1)


def without_suspects(z, label, limit):
    """Partial FC's filter: negatives above the limit, if there is one, count as orthogonal."""
    if limit is None:
        return z
    return np.where((z > limit) & (np.arange(len(z)) != label), 0, z)


def compute(name, x, weights, labels, negatives, offset, options):
    """Return the losses (B,) and the gradients of their sum, (B, D) and (K, D).

    Parameters
    ----------
    name : str
        Of the criterion's class.
    x, weights, labels : (B, D), (K × centres, D), (B,)
    negatives : list of list of int
        The classes per row.
    offset : (K,)
        Added to the logits of the negatives.
    options : dict
        All options of the loss; the twin takes those it has.
    """
    x, weights = np.asarray(x, float), np.asarray(weights, float)
    losses, to_x, to_weights = np.zeros(len(x)), np.zeros_like(x), np.zeros_like(weights)
    if options.get("d") == "learned":
        name += " learned"
    twin, wanted = TWINS[name]
    normalize = options["normalize"]
    centres = options.get("subcentres", 1)
    of_centres = [cosines(row, weights, normalize).reshape(-1, centres) for row in x]
    all_z = [z.max(axis=1) for z in of_centres]
    per_row = [{}] * len(x)
    if name in ARGUMENTS:
        z_y = [z[label] for z, label in zip(all_z, labels)]
        per_row = ARGUMENTS[name](x, z_y, max(map(len, negatives)), **options)
    limit = options.get("inter_filter")
    for row, (label, of_row) in enumerate(zip(labels, negatives)):
        z = all_z[row]
        constant = without_suspects(z, label, limit)
        known = {**options, **per_row[row], "constant_z_y": z[label], "constant_z": constant}
        known["length"] = np.linalg.norm(x[row])
        known = {key: known[key] for key in wanted if key in known}

        def loss(z, label=label, of_row=of_row, known=known):
            z = without_suspects(z, label, limit)
            return twin(z, label, of_row, offset, options["scale"], **known)

        losses[row] = loss(z)
        if "length" in wanted and known["length"]:
            longer, shorter = (
                loss(z, known={**known, "length": known["length"] + step}) for step in (STEP, -STEP)
            )
            to_x[row] += (longer - shorter) / (2 * STEP) * x[row] / known["length"]
        for k in {label, *of_row}:
            shift = np.eye(len(z))[k]
            up, down = z[k] + STEP, z[k] - STEP
            if normalize:  # at the ends of [-1, 1] a one-sided difference
                up, down = min(up, 1), max(down, -1)
            slope = (loss(z + shift * (up - z[k])) - loss(z + shift * (down - z[k]))) / (up - down)
            nearest = k * centres + of_centres[row][k].argmax()
            jacobian_x, jacobian_w = cosine_gradients(x[row], weights[nearest], normalize)
            to_x[row] += slope * jacobian_x
            to_weights[nearest] += slope * jacobian_w
    return losses, to_x, to_weights


def cosine_gradients(x, w, normalize):
    if not normalize:
        return w, x
    length_x, length_w = np.linalg.norm(x), np.linalg.norm(w)
    if length_x == 0 or length_w == 0:  # no direction: cosine 0, gradient 0
        return np.zeros_like(x), np.zeros_like(w)
    x, w = x / length_x, w / length_w
    return (w - (x @ w) * x) / length_x, (x - (x @ w) * w) / length_w
