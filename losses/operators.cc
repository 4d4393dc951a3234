// The passes of a step over class weights and logits, each in one sweep through memory.
//
// Operators for MXNet's engine on the CPU, loaded with mx.library.load. `kernels.py` calls them
// where they are built (python tools/build_operators.py) and does the same with MXNet's own
// operators where they are not.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "mxnet/lib_api.h"

using namespace mxnet::ext;
using Attributes = std::unordered_map<std::string, std::string>;
using Shapes = std::vector<std::vector<unsigned int>>;
using Tensors = std::vector<MXTensor>;

namespace {

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

template <int inputs, int outputs>
MXReturnValue count(const Attributes&, int* num_inputs, int* num_outputs) {
  *num_inputs = inputs;
  *num_outputs = outputs;
  return MX_SUCCESS;
}

// Every output is float32; so is every input but row numbers, which are int32.
template <int outputs>
MXReturnValue all_float(const Attributes&, std::vector<int>* in, std::vector<int>* out) {
  for (int type : *in) {
    if (type != kFloat32 && type != kInt32) {
      MX_ERROR_MSG << "dsoftmax's operators take float32 and int32" << std::endl;
      return MX_FAIL;
    }
  }
  for (int i = 0; i < outputs; ++i) (*out)[i] = kFloat32;
  return MX_SUCCESS;
}

// --- 1 / length of each row: vectors (n, D) -> (n, 1)

MXReturnValue inverse_norm_shape(const Attributes&, Shapes* in, Shapes* out) {
  (*out)[0] = {(*in)[0][0], 1};
  return MX_SUCCESS;
}

MXReturnValue inverse_norm(const Attributes&, Tensors* in, Tensors* out, const OpResource&) {
  const float* vectors = (*in)[0].data<float>();
  float* inverse = (*out)[0].data<float>();
  const int64_t count = (*in)[0].shape[0], width = (*in)[0].shape[1];
#pragma omp parallel for
  for (int64_t i = 0; i < count; ++i) {
    const float squared = squared_length(vectors + i * width, width);
    inverse[i] = squared > kSmallestNorm * kSmallestNorm ? 1 / std::sqrt(squared) : 0.0f;
  }
  return MX_SUCCESS;
}

// --- rows times factors: matrix (n, D), factor (n,) or (n, 1) -> (n, D)

MXReturnValue same_shape(const Attributes&, Shapes* in, Shapes* out) {
  (*out)[0] = (*in)[0];
  return MX_SUCCESS;
}

MXReturnValue scale_rows(const Attributes&, Tensors* in, Tensors* out, const OpResource&) {
  const float *matrix = (*in)[0].data<float>(), *factor = (*in)[1].data<float>();
  float* scaled = (*out)[0].data<float>();
  const int64_t count = (*in)[0].shape[0], width = (*in)[0].shape[1];
#pragma omp parallel for
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = i * width;
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) scaled[at + j] = factor[i] * matrix[at + j];
  }
  return MX_SUCCESS;
}

// --- gradient to normalised rows (n, D), these rows (n, D), their inverse norms (n, 1)
//     -> gradient to the rows (n, D)

MXReturnValue project(const Attributes&, Tensors* in, Tensors* out, const OpResource&) {
  const float *gradient = (*in)[0].data<float>(), *vectors = (*in)[1].data<float>();
  const float* inverse = (*in)[2].data<float>();
  float* projected = (*out)[0].data<float>();
  const int64_t count = (*in)[0].shape[0], width = (*in)[0].shape[1];
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
  return MX_SUCCESS;
}

// Finds the largest logit of each class of a row, which is divided by the norms in place, and which
// of its centres has it. `fixed` is the number of centres if the compiler is to know it, or 0.
template <int fixed>
void find_nearest(float* logits, const float* inverse, int64_t classes, int64_t centres,
                  float* nearest, int32_t* place) {
  const int64_t step = fixed ? fixed : centres;
#pragma omp simd
  for (int64_t j = 0; j < classes * step; ++j) logits[j] *= inverse[j];
#pragma omp simd
  for (int64_t j = 0; j < classes; ++j) {
    const float* of_class = logits + j * step;
    float best = of_class[0], sum = of_class[0];
    int32_t at = 0;
    for (int64_t k = 1; k < step; ++k) {
      sum += of_class[k];
      at = of_class[k] > best ? static_cast<int32_t>(k) : at;
      best = std::max(best, of_class[k]);
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
    for (int64_t k = 0; k < step; ++k) {
      out[j * step + k] = place[j] == k ? slopes[j] * inverse[j * step + k] : 0.0f;
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
// logit per class: that of the nearest centre.
template <class OfRow>
void over_rows(Tensors* in, Tensors* out, int64_t classes, const OfRow of_row) {
  float *logits = (*in)[0].data<float>(), *found = (*out)[0].data<float>();
  const float* inverse = (*in)[1].data<float>();
  const int64_t rows = (*in)[0].shape[0], centres = (*in)[0].shape[1] / classes;
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

// --- logits (B, C x centres), inverse (C x centres, 1), own (B,), offset (1, C)
//     -> probabilities x slope / norm (B, C x centres), n (B,), total (B,), largest (B,)
// The nearest centre of a class counts, and has its probability. The logits are divided by the norms
// and, if each class has one centre, masked in place; the offset is added on the way only.

MXReturnValue probabilities_shape(const Attributes&, Shapes* in, Shapes* out) {
  (*out)[0] = (*in)[0];
  for (int i = 1; i < 4; ++i) (*out)[i] = {(*in)[0][0]};
  return MX_SUCCESS;
}

MXReturnValue probabilities_mutate(const Attributes&, std::vector<int>* mutated) {
  *mutated = {0};
  return MX_SUCCESS;
}

// `shape_of` makes the shape of a row's logits.
template <class ShapeOf>
void probabilities_of(Tensors* in, Tensors* out, const ShapeOf shape_of) {
  const int32_t* own = (*in)[2].data<int32_t>();
  const float* offset = (*in)[3].data<float>();
  float *n = (*out)[1].data<float>(), *total = (*out)[2].data<float>();
  float* largest = (*out)[3].data<float>();
  over_rows(in, out, (*in)[3].shape[1], [=](int64_t i, float* z, const float* inverse,
                                            int64_t classes, float* p) {
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

MXReturnValue probabilities(const Attributes&, Tensors* in, Tensors* out, const OpResource&) {
  probabilities_of(in, out, [](int64_t) { return Identity(); });
  return MX_SUCCESS;
}

// --- the same with a fifth input, pieces (B, 9 x pieces)

template <int count>
struct PiecesOf {
  const float* numbers;
  Pieces<count> operator()(int64_t row) const {
    return Pieces<count>(numbers + kNumbers * count * row);
  }
};

const int kMostPieces = 3;  // of pieces.py

template <int count>
void shaped_probabilities_by(Tensors* in, Tensors* out) {
  probabilities_of(in, out, PiecesOf<count>{(*in)[4].data<float>()});
}

MXReturnValue shaped_probabilities(const Attributes&, Tensors* in, Tensors* out,
                                   const OpResource&) {
  using By = void (*)(Tensors*, Tensors*);
  const By by[kMostPieces] = {shaped_probabilities_by<1>, shaped_probabilities_by<2>,
                              shaped_probabilities_by<3>};
  by[(*in)[4].shape[1] / kNumbers - 1](in, out);
  return MX_SUCCESS;
}

// --- logits (B, C x centres), inverse (C x centres, 1), own (B,), weight (1, C), bias (B,),
//     pieces (B, 9 x pieces)
//     -> slopes / norm (B, C x centres), sum (B,), total (B,), largest (B,), mass (B,)
// The sum is that of weight x softplus(shaped logit - bias), the mass that of its slopes to the bias.
// Centres and logits are as above.

MXReturnValue activations_shape(const Attributes&, Shapes* in, Shapes* out) {
  (*out)[0] = (*in)[0];
  for (int i = 1; i < 5; ++i) (*out)[i] = {(*in)[0][0]};
  return MX_SUCCESS;
}

template <int count>
void activations_by(Tensors* in, Tensors* out) {
  const int32_t* own = (*in)[2].data<int32_t>();
  const float *weight = (*in)[3].data<float>(), *bias = (*in)[4].data<float>();
  const PiecesOf<count> shape_of = {(*in)[5].data<float>()};
  float *sum = (*out)[1].data<float>(), *total = (*out)[2].data<float>();
  float *largest = (*out)[3].data<float>(), *mass = (*out)[4].data<float>();
  over_rows(in, out, (*in)[3].shape[1], [=](int64_t i, float* z, const float* inverse,
                                            int64_t classes, float* p) {
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

MXReturnValue activations(const Attributes&, Tensors* in, Tensors* out, const OpResource&) {
  using By = void (*)(Tensors*, Tensors*);
  const By by[kMostPieces] = {activations_by<1>, activations_by<2>, activations_by<3>};
  by[(*in)[5].shape[1] / kNumbers - 1](in, out);
  return MX_SUCCESS;
}

// --- share (B,), logits (B, C), probabilities (B, C)
//     -> sum over the batch of their product (C, 1), transposed probabilities (C, B)

MXReturnValue along_shape(const Attributes&, Shapes* in, Shapes* out) {
  const unsigned int rows = (*in)[1][0], classes = (*in)[1][1];
  (*out)[0] = {classes, 1};
  (*out)[1] = {classes, rows};
  return MX_SUCCESS;
}

const int64_t kTile = 16;  // floats in a line of the cache

MXReturnValue along(const Attributes&, Tensors* in, Tensors* out, const OpResource&) {
  const float *share = (*in)[0].data<float>(), *logits = (*in)[1].data<float>();
  const float* probabilities = (*in)[2].data<float>();
  float *sums = (*out)[0].data<float>(), *transposed = (*out)[1].data<float>();
  const int64_t rows = (*in)[1].shape[0], classes = (*in)[1].shape[1];
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
  return MX_SUCCESS;
}

// --- SGD on rows of weight (K, D), and momentum (K, D) if there is any, in place:
//     gradient (n, D) - along (n, 1) * weight, rows (n,)  -> (1,), which says nothing

float number(const Attributes& attributes, const char* name) {
  return std::stof(attributes.at(name));
}

Sgd sgd_of(const Attributes& attributes) {
  return {number(attributes, "lr"), number(attributes, "momentum"), number(attributes, "wd"),
          number(attributes, "rescale_grad"), number(attributes, "clip_gradient")};
}

MXReturnValue sgd_count(const Attributes& attributes, int* num_inputs, int* num_outputs) {
  *num_inputs = number(attributes, "momentum") == 0 ? 4 : 5;
  *num_outputs = 1;
  return MX_SUCCESS;
}

MXReturnValue sgd_shape(const Attributes&, Shapes*, Shapes* out) {
  (*out)[0] = {1};
  return MX_SUCCESS;
}

MXReturnValue sgd_mutate(const Attributes& attributes, std::vector<int>* mutated) {
  *mutated = {3};
  if (number(attributes, "momentum") != 0) mutated->push_back(4);
  return MX_SUCCESS;
}

MXReturnValue sgd(const Attributes& attributes, Tensors* in, Tensors* out, const OpResource&) {
  const Sgd sgd = sgd_of(attributes);
  const float *gradient = (*in)[0].data<float>(), *along = (*in)[1].data<float>();
  const int32_t* rows = (*in)[2].data<int32_t>();
  float* weight = (*in)[3].data<float>();
  float* state = in->size() > 4 ? (*in)[4].data<float>() : nullptr;
  const int64_t count = (*in)[0].shape[0], width = (*in)[0].shape[1];
#pragma omp parallel for
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = rows[i] * width;
    if (state) {
      sgd_row(weight + at, state + at, gradient + i * width, along[i], sgd, width);
    } else {
      plain_sgd_row(weight + at, gradient + i * width, along[i], sgd, width);
    }
  }
  (*out)[0].data<float>()[0] = 0;
  return MX_SUCCESS;
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

// Arrays of 2-byte numbers are float16 to MXNet, whatever their bits mean.
template <int first>
MXReturnValue half_types(const Attributes&, std::vector<int>* in, std::vector<int>* out) {
  for (size_t i = 0; i < in->size(); ++i) {
    const bool is_half = static_cast<int>(i) >= first;
    if (is_half ? (*in)[i] != kFloat16 : (*in)[i] != kFloat32 && (*in)[i] != kInt32) {
      MX_ERROR_MSG << "dsoftmax's operator of 2-byte rows got another type" << std::endl;
      return MX_FAIL;
    }
  }
  (*out)[0] = kFloat32;
  return MX_SUCCESS;
}

bool is_bfloat16(const Attributes& attributes) { return attributes.at("format") == "bfloat16"; }

// rows (n,), 2-byte numbers (K, D) -> their rows as float32 (n, D)

MXReturnValue half_take_shape(const Attributes&, Shapes* in, Shapes* out) {
  (*out)[0] = {(*in)[0][0], (*in)[1][1]};
  return MX_SUCCESS;
}

template <class Half>
void half_take_rows(const int32_t* rows, const uint16_t* halves, int64_t count, int64_t width,
                    float* out) {
#pragma omp parallel for
  for (int64_t i = 0; i < count; ++i) {
    decode_row<Half>(halves + rows[i] * width, width, out + i * width);
  }
}

MXReturnValue half_take(const Attributes& attributes, Tensors* in, Tensors* out,
                        const OpResource&) {
  const auto take = is_bfloat16(attributes) ? half_take_rows<BFloat16> : half_take_rows<Float16>;
  take((*in)[0].data<int32_t>(), (*in)[1].data<uint16_t>(), (*in)[0].shape[0],
       (*in)[1].shape[1], (*out)[0].data<float>());
  return MX_SUCCESS;
}

// SGD as above, on 2-byte numbers: gradient (n, D), along (n, 1), rows (n,), keys (2, n) for
// weights and momenta, weight (K, D), and momentum (K, D) if there is any

MXReturnValue half_sgd_count(const Attributes& attributes, int* num_inputs, int* num_outputs) {
  *num_inputs = number(attributes, "momentum") == 0 ? 5 : 6;
  *num_outputs = 1;
  return MX_SUCCESS;
}

MXReturnValue half_sgd_mutate(const Attributes& attributes, std::vector<int>* mutated) {
  *mutated = {4};
  if (number(attributes, "momentum") != 0) mutated->push_back(5);
  return MX_SUCCESS;
}

template <class Half>
void half_sgd_rows(Tensors* in, const Sgd& sgd) {
  const float *gradient = (*in)[0].data<float>(), *along = (*in)[1].data<float>();
  const int32_t *rows = (*in)[2].data<int32_t>(), *keys = (*in)[3].data<int32_t>();
  uint16_t* weight = (*in)[4].data<uint16_t>();
  uint16_t* state = in->size() > 5 ? (*in)[5].data<uint16_t>() : nullptr;
  const int64_t count = (*in)[0].shape[0], width = (*in)[0].shape[1];
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

MXReturnValue half_sgd(const Attributes& attributes, Tensors* in, Tensors* out,
                       const OpResource&) {
  const Sgd sgd = sgd_of(attributes);
  if (is_bfloat16(attributes)) {
    half_sgd_rows<BFloat16>(in, sgd);
  } else {
    half_sgd_rows<Float16>(in, sgd);
  }
  (*out)[0].data<float>()[0] = 0;
  return MX_SUCCESS;
}

}  // namespace

REGISTER_OP(_dsoftmax_inverse_norm)
    .setForward(inverse_norm, "cpu")
    .setParseAttrs(count<1, 1>)
    .setInferType(all_float<1>)
    .setInferShape(inverse_norm_shape);

REGISTER_OP(_dsoftmax_scale_rows)
    .setForward(scale_rows, "cpu")
    .setParseAttrs(count<2, 1>)
    .setInferType(all_float<1>)
    .setInferShape(same_shape);

REGISTER_OP(_dsoftmax_project)
    .setForward(project, "cpu")
    .setParseAttrs(count<3, 1>)
    .setInferType(all_float<1>)
    .setInferShape(same_shape);

REGISTER_OP(_dsoftmax_probabilities)
    .setForward(probabilities, "cpu")
    .setParseAttrs(count<4, 4>)
    .setInferType(all_float<4>)
    .setInferShape(probabilities_shape)
    .setMutateInputs(probabilities_mutate);

REGISTER_OP(_dsoftmax_shaped_probabilities)
    .setForward(shaped_probabilities, "cpu")
    .setParseAttrs(count<5, 4>)
    .setInferType(all_float<4>)
    .setInferShape(probabilities_shape)
    .setMutateInputs(probabilities_mutate);

REGISTER_OP(_dsoftmax_activations)
    .setForward(activations, "cpu")
    .setParseAttrs(count<6, 5>)
    .setInferType(all_float<5>)
    .setInferShape(activations_shape)
    .setMutateInputs(probabilities_mutate);

REGISTER_OP(_dsoftmax_along)
    .setForward(along, "cpu")
    .setParseAttrs(count<3, 2>)
    .setInferType(all_float<2>)
    .setInferShape(along_shape);

REGISTER_OP(_dsoftmax_sgd)
    .setForward(sgd, "cpu")
    .setParseAttrs(sgd_count)
    .setInferType(all_float<1>)
    .setInferShape(sgd_shape)
    .setMutateInputs(sgd_mutate);

REGISTER_OP(_dsoftmax_half_take)
    .setForward(half_take, "cpu")
    .setParseAttrs(count<2, 1>)
    .setInferType(half_types<1>)
    .setInferShape(half_take_shape);

REGISTER_OP(_dsoftmax_half_sgd)
    .setForward(half_sgd, "cpu")
    .setParseAttrs(half_sgd_count)
    .setInferType(half_types<4>)
    .setInferShape(sgd_shape)
    .setMutateInputs(half_sgd_mutate);

MXReturnValue initialize(int version) {
  if (version >= 10700) return MX_SUCCESS;
  MX_ERROR_MSG << "dsoftmax's operators need MXNet 1.7 or newer" << std::endl;
  return MX_FAIL;
}
