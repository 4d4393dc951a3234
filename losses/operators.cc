// The passes of a step over class weights and logits, each in one sweep through memory.
//
// `operators.py` queues them on MXNet's engine where they are built (python tools/build_operators.py);
// `kernels.py` does the same with MXNet's own operators where they are not.
//
// They are no operators of MXNet's library API, because its engine runs one of those at a time: each
// holds the random numbers that all CPU contexts share. These are queued with their arrays alone.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct Array {
  void* memory;
  int64_t rows, columns;

  float* floats() const { return static_cast<float*>(memory); }
  int32_t* integers() const { return static_cast<int32_t*>(memory); }
  uint16_t* halves() const { return static_cast<uint16_t*>(memory); }
};

// What an operator is called with.
struct Arguments {
  std::vector<Array> written, read;  // the written ones may be read, too
  std::vector<float> numbers;
};

using Operator = void (*)(const Arguments&);

// Of kernels.py.
const float kNothing = -1e30f;
const float kSmallestNorm = 1e-10f;

const float kSmallestExponent = -87.0f;  // whose exponential is a normal number

// exp(x) for x <= 0 within 2 units in the last place, in a form compilers turn into vectors:
// 2^k exp(r) with |r| <= log(2) / 2.
inline float exp_of_negative(float x) {
  x = std::max(x, kSmallestExponent);
  const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to a whole number
  const float k = shifted - 12582912.0f;
  const float r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits <<= 23;  // the low bits of `shifted` are k
  int32_t value;
  std::memcpy(&value, &p, sizeof value);
  value += bits;
  std::memcpy(&p, &value, sizeof p);
  return p;
}

float squared_length(const float* row, int64_t width) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < width; ++j) sum += row[j] * row[j];
  return sum;
}

// log(1 + x) for 0 <= x <= 1 by the series of 2 artanh(w), w = x / (2 + x) <= 1 / 3.
inline float log_one_plus(float x) {
  const float w = x / (2.0f + x), square = w * w;
  float p = 1.0f / 15;
  p = p * square + 1.0f / 13;
  p = p * square + 1.0f / 11;
  p = p * square + 1.0f / 9;
  p = p * square + 1.0f / 7;
  p = p * square + 1.0f / 5;
  p = p * square + 1.0f / 3;
  p = p * square + 1.0f;
  return 2.0f * w * p;
}

// What becomes of a logit before the sum: nothing, or what pieces.py describes.

struct Identity {
  inline float value(float z) const { return z; }
  inline float slope(float) const { return 1.0f; }
};

struct Piece {
  float start, value[4], slope[3], floor;
};

const int kNumbers = sizeof(Piece) / sizeof(float);  // as pieces.py packs them

template <int count>
struct Pieces {
  Piece pieces[count];

  explicit Pieces(const float* numbers) { std::memcpy(pieces, numbers, sizeof pieces); }

  inline float value(float z) const {
    float result = z;
    for (int i = 0; i < count; ++i) {
      const float *f = pieces[i].value, x = std::max(z, pieces[i].floor);
      result = z > pieces[i].start ? ((f[3] * x + f[2]) * x + f[1]) * x + f[0] : result;
    }
    return result;
  }

  inline float slope(float z) const {
    float result = 1.0f;
    for (int i = 0; i < count; ++i) {
      const float *f = pieces[i].slope, x = std::max(z, pieces[i].floor);
      result = z > pieces[i].start ? (f[2] * x + f[1]) * x + f[0] : result;
    }
    return result;
  }
};

struct Summary {
  float total, largest, top;  // sum and largest of the logits, largest of those shaped, with offset
};

// Divides the logits by the norms and looks at them.
template <class Shape>
void scale(float* logits, const float* inverse, const float* offset, const Shape shape,
           int64_t count, Summary* summary) {
  float total = summary->total, largest = summary->largest, top = summary->top;
#pragma omp simd reduction(+ : total) reduction(max : largest, top)
  for (int64_t j = 0; j < count; ++j) {
    const float value = logits[j] * inverse[j];
    logits[j] = value;
    total += value;
    largest = std::max(largest, value);
    top = std::max(top, shape.value(value) + offset[j]);
  }
  *summary = {total, largest, top};
}

// Returns the sum of the exponentials; `out` holds each times the slope.
template <class Shape>
float exponentials(const float* logits, const float* offset, const Shape shape, float largest,
                   int64_t count, float* out) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < count; ++j) {
    const float shifted = shape.value(logits[j]) + offset[j] - largest;
    const float value = exp_of_negative(shifted) * (shifted >= kSmallestExponent);
    out[j] = value * shape.slope(logits[j]);
    sum += value;
  }
  return sum;
}

struct Activity {
  float total, largest, sum, mass;  // of the logits; of softplus and of its derivative
};

// Divides the logits by the norms and sums weight × softplus(shaped logit - bias).
template <class Shape>
void activate(float* logits, const float* inverse, const float* weight, float bias,
              const Shape shape, int64_t count, float* out, Activity* activity) {
  float total = activity->total, largest = activity->largest;
  float sum = activity->sum, mass = activity->mass;
#pragma omp simd reduction(+ : total, sum, mass) reduction(max : largest)
  for (int64_t j = 0; j < count; ++j) {
    const float z = logits[j] * inverse[j];
    logits[j] = z;
    total += z;
    largest = std::max(largest, z);
    const float x = shape.value(z) - bias, size = -std::fabs(x);
    const float e = exp_of_negative(size) * (size >= kSmallestExponent);
    const float inside = 1.0f / (1.0f + e);
    const float share = weight[j] * (x >= 0 ? inside : e * inside);
    sum += weight[j] * (std::max(x, 0.0f) + log_one_plus(e));
    mass += share;
    out[j] = share * shape.slope(z) * inverse[j];
  }
  *activity = {total, largest, sum, mass};
}

void divide(float* values, const float* inverse, float factor, int64_t count) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) values[j] *= factor * inverse[j];
}

struct Sgd {
  float lr, momentum, wd, rescale, clip;
};

void sgd_row(float* weight, float* state, const float* gradient, float along,
                    const Sgd& sgd, int64_t width) {
#pragma omp simd
  for (int64_t j = 0; j < width; ++j) {
    float g = sgd.rescale * (gradient[j] - along * weight[j]);
    g = std::min(std::max(g, -sgd.clip), sgd.clip) + sgd.wd * weight[j];
    state[j] = sgd.momentum * state[j] - sgd.lr * g;
    weight[j] += state[j];
  }
}

void plain_sgd_row(float* weight, const float* gradient, float along, const Sgd& sgd,
                          int64_t width) {
#pragma omp simd
  for (int64_t j = 0; j < width; ++j) {
    float g = sgd.rescale * (gradient[j] - along * weight[j]);
    g = std::min(std::max(g, -sgd.clip), sgd.clip) + sgd.wd * weight[j];
    weight[j] -= sgd.lr * g;
  }
}

// --- 1 / length of each row: vectors (n, D) -> (n, 1)

void inverse_norm(const Arguments& given) {
  const float* vectors = given.read[0].floats();
  float* inverse = given.written[0].floats();
  const int64_t count = given.read[0].rows, width = given.read[0].columns;
#pragma omp parallel for
  for (int64_t i = 0; i < count; ++i) {
    const float squared = squared_length(vectors + i * width, width);
    inverse[i] = squared > kSmallestNorm * kSmallestNorm ? 1 / std::sqrt(squared) : 0.0f;
  }
}

// --- rows times factors: matrix (n, D), factor (n,) or (n, 1) -> (n, D)

void scale_rows(const Arguments& given) {
  const float *matrix = given.read[0].floats(), *factor = given.read[1].floats();
  float* scaled = given.written[0].floats();
  const int64_t count = given.read[0].rows, width = given.read[0].columns;
#pragma omp parallel for
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = i * width;
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) scaled[at + j] = factor[i] * matrix[at + j];
  }
}

// --- gradient to normalised rows (n, D), these rows (n, D), their inverse norms (n, 1)
//     -> gradient to the rows (n, D)

void project(const Arguments& given) {
  const float *gradient = given.read[0].floats(), *vectors = given.read[1].floats();
  const float* inverse = given.read[2].floats();
  float* projected = given.written[0].floats();
  const int64_t count = given.read[0].rows, width = given.read[0].columns;
#pragma omp parallel for
  for (int64_t i = 0; i < count; ++i) {
    const float *g = gradient + i * width, *v = vectors + i * width;
    float* result = projected + i * width;
    float along = 0;
#pragma omp simd reduction(+ : along)
    for (int64_t j = 0; j < width; ++j) along += g[j] * v[j];
    along *= inverse[i] * inverse[i];
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) result[j] = inverse[i] * (g[j] - along * v[j]);
  }
}

// Finds the largest logit of each class of a row, which is divided by the norms in place, and which
// of its centres has it. `fixed` is the number of centres if the compiler is to know it, or 0.
template <int fixed>
void find_nearest(float* logits, const float* inverse, int64_t classes, int64_t centres,
                  float* nearest, int32_t* place) {
  const int64_t step = fixed ? fixed : centres;
#pragma omp simd
  for (int64_t j = 0; j < classes; ++j) {
    float* of_class = logits + j * step;
    const float* of_norms = inverse + j * step;
    float best = of_class[0] * of_norms[0], sum = best;
    of_class[0] = best;
    int32_t at = 0;
    for (int64_t k = 1; k < step; ++k) {
      const float value = of_class[k] * of_norms[k];
      of_class[k] = value;
      sum += value;
      at = value > best ? static_cast<int32_t>(k) : at;
      best = std::max(best, value);
    }
    nearest[j] = best + 0 * sum;  // the sum does not overlook a NaN
    place[j] = at;
  }
}

// Gives the slope of each class to its nearest centre, divided by the norm; 0 to the others.
template <int fixed>
void spread(const float* slopes, const int32_t* place, const float* inverse, int64_t classes,
            int64_t centres, float* out) {
  const int64_t step = fixed ? fixed : centres;
#pragma omp simd
  for (int64_t j = 0; j < classes; ++j) {
    const float slope = slopes[j];
    const int32_t at = place[j];
    for (int64_t k = 0; k < step; ++k) {
      out[j * step + k] = (k == at ? slope : 0.0f) * inverse[j * step + k];
    }
  }
}

template <int fixed, class OfRow>
void over_nearest(int64_t rows, float* logits, const float* inverse, int64_t classes,
                  int64_t centres, float* out, const OfRow of_row) {
  const std::vector<float> ones(classes, 1.0f);
#pragma omp parallel
  {
    std::vector<float> nearest(classes), slopes(classes);
    std::vector<int32_t> place(classes);
#pragma omp for
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t at = i * classes * centres;
      find_nearest<fixed>(logits + at, inverse, classes, centres, nearest.data(), place.data());
      of_row(i, nearest.data(), ones.data(), classes, slopes.data());
      spread<fixed>(slopes.data(), place.data(), inverse, classes, centres, out + at);
    }
  }
}

// Calls of_row(i, logits, inverse, classes, out) for each row of logits (B, C x centres), with one
// logit per class: that of the nearest centre. The arrays are those of the next two operators.
template <class OfRow>
void over_rows(const Arguments& given, const OfRow of_row) {
  float *logits = given.written[0].floats(), *found = given.written[1].floats();
  const float* inverse = given.read[0].floats();
  const int64_t rows = given.written[0].rows, classes = given.read[2].columns;
  const int64_t centres = given.written[0].columns / classes;
  if (centres == 1) {
#pragma omp parallel for
    for (int64_t i = 0; i < rows; ++i) {
      of_row(i, logits + i * classes, inverse, classes, found + i * classes);
    }
  } else if (centres == 2) {
    over_nearest<2>(rows, logits, inverse, classes, centres, found, of_row);
  } else if (centres == 3) {
    over_nearest<3>(rows, logits, inverse, classes, centres, found, of_row);
  } else {
    over_nearest<0>(rows, logits, inverse, classes, centres, found, of_row);
  }
}

// --- inverse (C x centres, 1), own (B,), offset (1, C)
//     -> logits (B, C x centres), probabilities x slope / norm (B, C x centres), n (B,), total (B,),
//        largest (B,)
// The nearest centre of a class counts, and has its probability. The logits are divided by the norms
// and, if each class has one centre, masked in place; the offset is added on the way only.

// `shape_of` makes the shape of a row's logits.
template <class ShapeOf>
void probabilities_of(const Arguments& given, const ShapeOf shape_of) {
  const int32_t* own = given.read[1].integers();
  const float* offset = given.read[2].floats();
  float *n = given.written[2].floats(), *total = given.written[3].floats();
  float* largest = given.written[4].floats();
  over_rows(given, [=](int64_t i, float* z, const float* inverse, int64_t classes, float* p) {
    const auto shape = shape_of(i);
    // The own class is no negative: look at those before it and at those after it.
    const int64_t before = own[i] < 0 ? classes : own[i], after = std::min(before + 1, classes);
    Summary summary = {0, kNothing, kNothing};
    scale(z, inverse, offset, shape, before, &summary);
    scale(z + after, inverse + after, offset + after, shape, classes - after, &summary);
    float sum = exponentials(z, offset, shape, summary.top, before, p);
    sum += exponentials(z + after, offset + after, shape, summary.top, classes - after, p + after);
    if (before < classes) {
      z[before] = kNothing;
      p[before] = 0;
    }
    // Comparisons overlook a NaN, the total doesn't: a class weight that is no number must show.
    n[i] = (sum > 0 ? summary.top + std::log(sum) : kNothing) + 0 * summary.total;
    total[i] = summary.total;
    largest[i] = summary.largest;
    divide(p, inverse, sum > 0 ? 1 / sum : 0, classes);
  });
}

void probabilities(const Arguments& given) {
  probabilities_of(given, [](int64_t) { return Identity(); });
}

// --- the same, which also reads pieces (B, 9 x pieces)

template <int count>
struct PiecesOf {
  const float* numbers;
  Pieces<count> operator()(int64_t row) const {
    return Pieces<count>(numbers + kNumbers * count * row);
  }
};

const int kMostPieces = 3;  // of pieces.py

template <int count>
void shaped_probabilities_by(const Arguments& given) {
  probabilities_of(given, PiecesOf<count>{given.read[3].floats()});
}

void shaped_probabilities(const Arguments& given) {
  const Operator by[kMostPieces] = {shaped_probabilities_by<1>, shaped_probabilities_by<2>,
                                    shaped_probabilities_by<3>};
  by[given.read[3].columns / kNumbers - 1](given);
}

// --- inverse (C x centres, 1), own (B,), weight (1, C), bias (B,), pieces (B, 9 x pieces)
//     -> logits (B, C x centres), slopes / norm (B, C x centres), sum (B,), total (B,),
//        largest (B,), mass (B,)
// The sum is that of weight x softplus(shaped logit - bias), the mass that of its slopes to the bias.
// Centres and logits are as above.

template <int count>
void activations_by(const Arguments& given) {
  const int32_t* own = given.read[1].integers();
  const float *weight = given.read[2].floats(), *bias = given.read[3].floats();
  const PiecesOf<count> shape_of = {given.read[4].floats()};
  float *sum = given.written[2].floats(), *total = given.written[3].floats();
  float *largest = given.written[4].floats(), *mass = given.written[5].floats();
  over_rows(given, [=](int64_t i, float* z, const float* inverse, int64_t classes, float* p) {
    const auto shape = shape_of(i);
    const int64_t before = own[i] < 0 ? classes : own[i], after = std::min(before + 1, classes);
    Activity activity = {0, kNothing, 0, 0};
    activate(z, inverse, weight, bias[i], shape, before, p, &activity);
    activate(z + after, inverse + after, weight + after, bias[i], shape, classes - after, p + after,
             &activity);
    if (before < classes) {
      z[before] = kNothing;
      p[before] = 0;
    }
    sum[i] = activity.sum + 0 * activity.total;
    total[i] = activity.total;
    largest[i] = activity.largest;
    mass[i] = activity.mass;
  });
}

void activations(const Arguments& given) {
  const Operator by[kMostPieces] = {activations_by<1>, activations_by<2>, activations_by<3>};
  by[given.read[4].columns / kNumbers - 1](given);
}

// --- share (B,), logits (B, C), probabilities (B, C)
//     -> sum over the batch of their product (C, 1), transposed probabilities (C, B)

const int64_t kTile = 16;  // floats in a line of the cache

void along(const Arguments& given) {
  const float *share = given.read[0].floats(), *logits = given.read[1].floats();
  const float* probabilities = given.read[2].floats();
  float *sums = given.written[0].floats(), *transposed = given.written[1].floats();
  const int64_t rows = given.read[1].rows, classes = given.read[1].columns;
#pragma omp parallel for schedule(static)
  for (int64_t start = 0; start < classes; start += kTile) {
    const int64_t count = std::min(kTile, classes - start);
    float sum[kTile] = {0};
    float tile[kTile][kTile];
    for (int64_t top = 0; top < rows; top += kTile) {
      const int64_t height = std::min(kTile, rows - top);
      for (int64_t i = 0; i < height; ++i) {
        const int64_t at = (top + i) * classes + start;
        const float *z = logits + at, *p = probabilities + at, factor = share[top + i];
        if (count == kTile) {
#pragma omp simd
          for (int64_t j = 0; j < kTile; ++j) {
            sum[j] += factor * z[j] * p[j];
            tile[i][j] = p[j];
          }
        } else {
          for (int64_t j = 0; j < count; ++j) {
            sum[j] += factor * z[j] * p[j];
            tile[i][j] = p[j];
          }
        }
      }
      for (int64_t j = 0; j < count; ++j) {
        float* line = transposed + (start + j) * rows + top;
        for (int64_t i = 0; i < height; ++i) line[i] = tile[i][j];
      }
    }
    std::copy_n(sum, count, sums + start);
  }
}

// --- gradient (n, D), of which along (n, 1) * weight is still to be taken; along; rows (n,)
//     -> rows of weight (K, D), and of momentum (K, D) if there is any, after a step of SGD

Sgd sgd_of(const Arguments& given) {
  const std::vector<float>& numbers = given.numbers;
  return {numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]};
}

void sgd(const Arguments& given) {
  const Sgd sgd = sgd_of(given);
  const float *gradient = given.read[0].floats(), *along = given.read[1].floats();
  const int32_t* rows = given.read[2].integers();
  float* weight = given.written[0].floats();
  float* state = given.written.size() > 1 ? given.written[1].floats() : nullptr;
  const int64_t count = given.read[0].rows, width = given.read[0].columns;
#pragma omp parallel for
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = rows[i] * width;
    if (state) {
      sgd_row(weight + at, state + at, gradient + i * width, along[i], sgd, width);
    } else {
      plain_sgd_row(weight + at, gradient + i * width, along[i], sgd, width);
    }
  }
}

// --- 2-byte numbers, as half_rows.py does it with NumPy, to the bit

// In this part a * b + c is rounded twice, as NumPy rounds it.
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#endif

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Mixes all bits of a number (lowbias32, found by Chris Wellons).
inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

const uint32_t kGolden = 0x9e3779b9u;  // between the columns of a row

struct Float16 {
  static inline float decode(uint16_t half) {
    const uint32_t size = half & 0x7fffu, sign = (half & 0x8000u) << 16;
    const uint32_t shift = size >= 0x7c00u ? 224u << 23 : 112u << 23;
    const uint32_t normal = (size << 13) + shift;
    const uint32_t small = bits_of(static_cast<float>(static_cast<int32_t>(size)) * 0x1p-24f);
    return float_of((size < 0x400u ? small : normal) | sign);
  }

  // The lower or the upper neighbour, by a random number; the mean is the value.
  static inline uint16_t round(float value, uint32_t random) {
    const uint32_t bits = bits_of(value), size = bits & 0x7fffffffu;
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t normal = ((size + (random & 0x1fffu)) >> 13) - (112u << 10);
    // Below 2^-14 the distance of neighbours is 2^-24, so that more bits are dropped.
    const uint32_t exponent = size >> 23;
    const uint32_t below = exponent < 113u ? 113u - exponent : 0u;
    const uint32_t excess = below > 18u ? below - 18u : 0u;
    const uint32_t whole = ((size & 0x7fffffu) | 0x800000u) >> (excess < 31u ? excess : 31u);
    const uint32_t drop = 13u + (below < 18u ? below : 18u);
    const uint32_t small = (whole + (random & ((1u << drop) - 1u))) >> drop;
    uint32_t half = below ? small : normal;
    half = half > 0x7c00u ? 0x7c00u : half;
    half = size > 0x7f800000u ? 0x7e00u : half;
    half = size == 0x7f800000u ? 0x7c00u : half;
    return static_cast<uint16_t>(half | sign);
  }
};

struct BFloat16 {
  static inline float decode(uint16_t half) {
    return float_of(static_cast<uint32_t>(half) << 16);
  }

  static inline uint16_t round(float value, uint32_t random) {
    const uint32_t bits = bits_of(value), size = bits & 0x7fffffffu;
    const uint32_t finite = (bits + (random & 0xffffu)) >> 16;
    const uint32_t other = (bits >> 16) | (size > 0x7f800000u ? 0x40u : 0u);
    return static_cast<uint16_t>(size >= 0x7f800000u ? other : finite);
  }
};

template <class Half>
void decode_row(const uint16_t* halves, int64_t width, float* out) {
#pragma omp simd
  for (int64_t j = 0; j < width; ++j) out[j] = Half::decode(halves[j]);
}

template <class Half>
void half_sgd_row(uint16_t* weight, uint16_t* state, const float* gradient, float along,
                  const Sgd& sgd, uint32_t weight_key, uint32_t state_key, int64_t width) {
  const float lr = sgd.lr, momentum = sgd.momentum, wd = sgd.wd, rescale = sgd.rescale;
  const float clip = sgd.clip;
#pragma omp simd
  for (int64_t j = 0; j < width; ++j) {
    const uint32_t column = static_cast<uint32_t>(j) * kGolden;
    const float w = Half::decode(weight[j]);
    float g = rescale * (gradient[j] - along * w);
    g = g < -clip ? -clip : g;
    g = (g > clip ? clip : g) + wd * w;
    const float moved = momentum * Half::decode(state[j]) - lr * g;
    state[j] = Half::round(moved, mix(state_key + column));
    weight[j] = Half::round(w + moved, mix(weight_key + column));
  }
}

template <class Half>
void plain_half_sgd_row(uint16_t* weight, const float* gradient, float along, const Sgd& sgd,
                        uint32_t weight_key, int64_t width) {
  const float lr = sgd.lr, wd = sgd.wd, rescale = sgd.rescale, clip = sgd.clip;
#pragma omp simd
  for (int64_t j = 0; j < width; ++j) {
    const float w = Half::decode(weight[j]);
    float g = rescale * (gradient[j] - along * w);
    g = g < -clip ? -clip : g;
    g = (g > clip ? clip : g) + wd * w;
    const uint32_t random = mix(weight_key + static_cast<uint32_t>(j) * kGolden);
    weight[j] = Half::round(w - lr * g, random);
  }
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif

// --- rows (n,), 2-byte numbers (K, D) -> their rows as float32 (n, D)

template <class Half>
void half_take(const Arguments& given) {
  const int32_t* rows = given.read[0].integers();
  const uint16_t* halves = given.read[1].halves();
  float* out = given.written[0].floats();
  const int64_t count = given.written[0].rows, width = given.written[0].columns;
#pragma omp parallel for
  for (int64_t i = 0; i < count; ++i) {
    decode_row<Half>(halves + rows[i] * width, width, out + i * width);
  }
}

// --- SGD as above, on 2-byte numbers, which also reads keys (2, n) for weights and momenta

template <class Half>
void half_sgd(const Arguments& given) {
  const Sgd sgd = sgd_of(given);
  const float *gradient = given.read[0].floats(), *along = given.read[1].floats();
  const int32_t *rows = given.read[2].integers(), *keys = given.read[3].integers();
  uint16_t* weight = given.written[0].halves();
  uint16_t* state = given.written.size() > 1 ? given.written[1].halves() : nullptr;
  const int64_t count = given.read[0].rows, width = given.read[0].columns;
#pragma omp parallel for
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = rows[i] * width;
    const float* g = gradient + i * width;
    if (state) {
      half_sgd_row<Half>(weight + at, state + at, g, along[i], sgd, keys[i], keys[count + i],
                         width);
    } else {
      plain_half_sgd_row<Half>(weight + at, g, along[i], sgd, keys[i], width);
    }
  }
}

// --- matrix (K, D), rows of it (n,), vectors (B, D), one of them for each row (n,) -> products (n,)

void row_products(const Arguments& given) {
  const float *matrix = given.read[0].floats(), *vectors = given.read[2].floats();
  const int32_t *rows = given.read[1].integers(), *places = given.read[3].integers();
  float* products = given.written[0].floats();
  const int64_t count = given.written[0].rows, width = given.read[0].columns;
#pragma omp parallel for
  for (int64_t i = 0; i < count; ++i) {
    const float *row = matrix + rows[i] * width, *vector = vectors + places[i] * width;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < width; ++j) sum += row[j] * vector[j];
    products[i] = sum;
  }
}

// --- () -> the number of threads (1,) that whatever runs later on this context may use: as many as
//     before, or the number given if that is less

void limit_threads(const Arguments& given) {
  omp_set_num_threads(std::min(omp_get_max_threads(), static_cast<int>(given.numbers[0])));
  given.written[0].floats()[0] = static_cast<float>(omp_get_max_threads());
}

// --- how MXNet's engine runs them

// With the types of the arrays: float32, int32 or 2-byte numbers, which are float16 to MXNet.
const struct Known {
  const char* name;
  Operator run;
  const char *written, *read;
} kOperators[] = {
    {"inverse_norm", inverse_norm, "f", "f"},
    {"scale_rows", scale_rows, "f", "ff"},
    {"project", project, "f", "fff"},
    {"probabilities", probabilities, "fffff", "fif"},
    {"shaped_probabilities", shaped_probabilities, "fffff", "fiff"},
    {"activations", activations, "ffffff", "fifff"},
    {"along", along, "ff", "fff"},
    {"sgd", sgd, "ff", "ffi"},
    {"float16_take", half_take<Float16>, "f", "ih"},
    {"bfloat16_take", half_take<BFloat16>, "f", "ih"},
    {"float16_sgd", half_sgd<Float16>, "hh", "ffii"},
    {"bfloat16_sgd", half_sgd<BFloat16>, "hh", "ffii"},
    {"row_products", row_products, "f", "fifi"},
    {"limit_threads", limit_threads, "f", ""},
};

// Functions of MXNet's C API, in the order of operators.py; all return 0 if all is well.
struct MXNet {
  int (*type_of)(void* array, int* type);
  int (*detach)(void* array, void** copied);  // makes another handle of the same memory
  int (*free)(void* array);
  int (*memory_of)(void* array, void** memory);
  int (*push)(void (*run)(void*, void*), void* param, void (*release)(void*), const void* context,
              void** read, int read_count, void** written, int written_count, const void* property,
              int priority, const char* name);
} mxnet;

// An operator that waits in the engine, with its arrays.
struct Call {
  Operator run;
  Arguments given;
  std::vector<void*> written, read;  // handles of its own

  ~Call() {
    for (void* array : written) mxnet.free(array);
    for (void* array : read) mxnet.free(array);
  }
};

// An array that another operator is to make has no memory before that has run.
void find_memory(const std::vector<void*>& handles, std::vector<Array>* arrays) {
  for (size_t i = 0; i < handles.size(); ++i) mxnet.memory_of(handles[i], &(*arrays)[i].memory);
}

void run_call(void*, void* param) {
  Call* call = static_cast<Call*>(param);
  find_memory(call->written, &call->given.written);
  find_memory(call->read, &call->given.read);
  call->run(call->given);
}

void release_call(void* param) { delete static_cast<Call*>(param); }

char letter_of(int type) { return type == 0 ? 'f' : type == 4 ? 'i' : type == 2 ? 'h' : '?'; }

const int kUnknown = -2, kOtherType = -3;  // beside MXNet's errors

// Keeps arrays of the types that an operator knows; fewer than those if it allows for that.
int hold(const char* types, void* const* handles, const int64_t* shapes, int count,
         std::vector<void*>* held, std::vector<Array>* arrays) {
  for (int i = 0; i < count; ++i) {
    int type = -1;
    if (const int error = mxnet.type_of(handles[i], &type)) return error;
    if (types[i] != letter_of(type)) return kOtherType;
    void* copied = nullptr;
    if (const int error = mxnet.detach(handles[i], &copied)) return error;
    held->push_back(copied);
    arrays->push_back({nullptr, shapes[2 * i], shapes[2 * i + 1]});
  }
  return 0;
}

struct Context {
  int32_t type, number;  // as MXNet has it
};

const int32_t kCPU = 1;

}  // namespace

extern "C" {

void dsoftmax_connect(const MXNet* functions) { mxnet = *functions; }

// Queues an operator. Shapes are pairs of rows and columns. Returns an error of MXNet or of the above.
int dsoftmax_push(const char* name, int device, void* const* written, const int64_t* written_shapes,
                  int written_count, void* const* read, const int64_t* read_shapes, int read_count,
                  const float* numbers, int number_count) {
  for (const Known& known : kOperators) {
    if (std::strcmp(known.name, name)) continue;
    Call* call = new Call;
    call->run = known.run;
    Arguments& given = call->given;
    given.numbers.assign(numbers, numbers + number_count);
    int error = hold(known.written, written, written_shapes, written_count, &call->written,
                     &given.written);
    if (!error) error = hold(known.read, read, read_shapes, read_count, &call->read, &given.read);
    if (error) {
      release_call(call);
      return error;
    }
    const Context context = {kCPU, device};
    return mxnet.push(run_call, call, release_call, &context, call->read.data(), read_count,
                      call->written.data(), written_count, nullptr, 0, known.name);
  }
  return kUnknown;
}

// Finds the classes in some leaves of a forest that agree with a sample on most sides of its planes,
// for each of `samples`: up to `most`, each once, sorted. Of equally likely ones it takes the first.
//   classes of all leaves, starts (all leaves + 1,), leaves (samples, leaves), sides of classes
//   (classes, words) and samples (samples, words) -> found (samples, most), sizes (samples,)
void dsoftmax_find_candidates(const int32_t* classes, const int64_t* starts, const int64_t* leaves,
                              int64_t leaves_each, const uint64_t* sides, const uint64_t* own_sides,
                              int64_t words, int64_t samples, int64_t most, int threads,
                              int32_t* found, int64_t* sizes) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<uint64_t> ranked;  // how many sides differ, and in the lower half the class
#pragma omp for
    for (int64_t i = 0; i < samples; ++i) {
      ranked.clear();
      for (int64_t leaf = 0; leaf < leaves_each; ++leaf) {
        const int64_t number = leaves[i * leaves_each + leaf];
        for (int64_t place = starts[number]; place < starts[number + 1]; ++place) {
          const uint64_t* of_class = sides + classes[place] * words;
          uint64_t differ = 0;
          for (int64_t j = 0; j < words; ++j) {
            differ += __builtin_popcountll(of_class[j] ^ own_sides[i * words + j]);
          }
          ranked.push_back(differ << 32 | static_cast<uint32_t>(classes[place]));
        }
      }
      // A class may be there once per tree: take more than needed, and all if that is too few.
      const int64_t all = ranked.size();
      int64_t taken = std::min(all, most + most / 8 + 16), once;
      for (;; taken = all) {
        if (taken < all) std::nth_element(ranked.begin(), ranked.begin() + taken, ranked.end());
        std::sort(ranked.begin(), ranked.begin() + taken);
        once = std::unique(ranked.begin(), ranked.begin() + taken) - ranked.begin();
        if (once >= most || taken == all) break;
      }
      sizes[i] = std::min(once, most);
      for (int64_t k = 0; k < sizes[i]; ++k) {
        found[i * most + k] = static_cast<int32_t>(ranked[k] & 0xffffffffu);
      }
      std::sort(found + i * most, found + i * most + sizes[i]);
    }
  }
}

}  // extern "C"
