/* Attention (equation 1) of few queries: to a source, whose keys were laid side by side once, and to a past that lies
 * in pieces. The queries are scaled already. */

#include "native.h"

INLINE Vec take(const void *from, int64_t place, const int half) {
    return half ? load_half((const uint16_t *)from + place) : load((const float *)from + place);
}

void lay_keys(const float *keys, int64_t row, int64_t length, int64_t width, void *to, int half) {
    for (int64_t block = 0; block < up(length, LANES); block += LANES)
        for (int64_t k = 0; k < width; k++)
            for (int64_t i = 0; i < LANES; i++) {
                float key = block + i < length ? keys[(block + i) * row + k] : 0.0f;
                int64_t place = (block * width) + k * LANES + i;
                if (half)
                    ((uint16_t *)to)[place] = to_half(key);
                else
                    ((float *)to)[place] = key;
            }
}

/* Scores (padded) to weights that add up to 1; those behind `length` become 0. */
static void softmax(float *scores, int64_t length) {
    int64_t padded = up(length, LANES);
    for (int64_t i = length; i < padded; i++) scores[i] = -INFINITY;
    Vec most = load(scores);
    for (int64_t i = LANES; i < padded; i += LANES) most = largest(most, load(scores + i));
    Vec highest = splat(largest_lane(most)), total = {0};
    for (int64_t i = 0; i < padded; i += LANES) {
        Vec weight = exponential(load(scores + i) - highest);
        total += weight;
        store(scores + i, weight);
    }
    Vec share = splat(1.0f / sum_of_lanes(total));
    for (int64_t i = 0; i < padded; i += LANES) store(scores + i, load(scores + i) * share);
}

enum { LINE = 64, AHEAD = 1024 }; /* bytes: what memory is read in, and how far ahead of the reading */

INLINE const void *behind(const void *from, int64_t numbers, const int half) {
    return (const char *)from + numbers * (half ? 2 : 4);
}

/* Have so many numbers on their way. */
INLINE void fetch(const void *from, int64_t numbers, const int half) {
    const char *end = behind(from, numbers, half);
    for (const char *line = from; line < end; line += LINE) __builtin_prefetch(line);
}

/* A panel of the values under their weights; `at` is where those of a position lie. Queries share the reading. */
#define MIX(count, at, half)                                                                                           \
    Vec sum[4][TILE_VECTORS] = {{{0}}};                                                                                \
    const float *weight[4][TILE_VECTORS];                                                                              \
    for (int i = 0; i < count; i++)                                                                                    \
        for (int j = 0; j < TILE_VECTORS; j++)                                                                         \
            weight[i][j] = scores + (i * model->heads + (column + j * LANES) / model->head) * padded;                  \
    for (int64_t p = 0; p < length; p++) {                                                                             \
        const void *values = at;                                                                                       \
        _Pragma("GCC unroll 4") for (int j = 0; j < TILE_VECTORS; j++) {                                               \
            Vec value = take(values, j * LANES, half);                                                                 \
            _Pragma("GCC unroll 4") for (int i = 0; i < count; i++) sum[i][j] += weight[i][j][p] * value;              \
        }                                                                                                              \
    }                                                                                                                  \
    for (int i = 0; i < count; i++)                                                                                    \
        for (int j = 0; j < TILE_VECTORS; j++) store(found + i * width + column + j * LANES, sum[i][j]);

INLINE void to_source(const int count, const Model *model, const Source *source, const float *q, int64_t q_row,
                      float *found, float *scores, const int half) {
    const int64_t head = model->head, width = model->heads * head, length = source->length, padded = up(length, LANES);
    enum { PARTS = 4 }; /* sums that do not wait for one another */
    for (int64_t block = 0; block < padded; block += LANES)
        for (int64_t h = 0; h < model->heads; h++) {
            Vec sum[4][PARTS] = {{{0}}};
            for (int64_t k = 0; k < head; k += PARTS) {
                int64_t later = block * width + (h * head + k) * LANES + AHEAD / (half ? 2 : 4);
                fetch(behind(source->keys, later, half), PARTS * LANES, half);
#pragma GCC unroll 4
                for (int part = 0; part < PARTS; part++) {
                    Vec key = take(source->keys, block * width + (h * head + k + part) * LANES, half);
#pragma GCC unroll 4
                    for (int i = 0; i < count; i++) sum[i][part] += q[i * q_row + h * head + k + part] * key;
                }
            }
            for (int i = 0; i < count; i++) {
                Vec all = sum[i][0];
                for (int part = 1; part < PARTS; part++) all += sum[i][part];
                store(scores + (i * model->heads + h) * padded + block, all);
            }
        }
    for (int64_t each = 0; each < count * model->heads; each++) softmax(scores + each * padded, length);
    for (int64_t column = 0; column < width; column += PANEL) {
        const void *values_of_panel = behind(source->values, column / PANEL * source->panel, half);
        MIX(count, behind(values_of_panel, p * source->row, half), half)
    }
}

void attend_to_source(const Model *model, const Source *source, int64_t count, const float *q, int64_t q_row,
                      float *found, float *scores) {
    const int64_t width = model->heads * model->head;
    int64_t some;
    for (int64_t i = 0; i < count; i += some, q += some * q_row, found += some * width) {
        some = count - i >= 4 ? 4 : count - i >= 2 ? 2 : 1;
#define SOME(n)                                                                                                        \
    (source->half ? to_source(n, model, source, q, q_row, found, scores, 1)                                            \
                  : to_source(n, model, source, q, q_row, found, scores, 0))
        if (some == 4) SOME(4);
        else if (some == 2) SOME(2);
        else SOME(1);
    }
}

INLINE void to_past(const Model *model, const void *const *past, int64_t length, const void *const *next,
                    int64_t next_length, const float *q, float *found, float *scores, const int half) {
    const int64_t head = model->head, width = model->heads * head, padded = up(length, LANES);
    for (int64_t block = 0; block < padded; block += LANES) {
        for (int64_t p = block; p < block + LANES && p < length; p++) {
            fetch(behind(past[p], width, half), width, half);
            if (p + LANES < length) fetch(past[p + LANES], width, half);
        }
        for (int64_t h = 0; h < model->heads; h++) {
            Vec part[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                const void *keys = past[block + i < length ? block + i : length - 1];
                Vec sum = {0};
                for (int64_t k = h * head; k < (h + 1) * head; k += LANES) sum += load(q + k) * take(keys, k, half);
                part[i] = sum;
            }
            store(scores + h * padded + block, add_lanes(part));
        }
    }
    for (int64_t p = 0; p < LANES && p < next_length; p++) fetch(next[p], width, half);
    for (int64_t h = 0; h < model->heads; h++) softmax(scores + h * padded, length);
    for (int64_t column = 0; column < width; column += PANEL) {
        MIX(1, behind(past[p], width + column, half), half)
    }
}

void attend_to_past(const Model *model, const void *const *past, int64_t length, const void *const *next,
                    int64_t next_length, const float *q, float *found, float *scores) {
    if (model->half)
        to_past(model, past, length, next, next_length, q, found, scores, 1);
    else
        to_past(model, past, length, next, next_length, q, found, scores, 0);
}
