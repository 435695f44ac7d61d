/* Attention (equation 1) of a few queries: to packed keys and values of one sentence, and to a paged KV cache. The
 * queries are already scaled by 1/√d_k. */

#include "native.h"

INLINE Vec load_cached(const void *from, int64_t index, const int bf16) {
    return bf16 ? load_bf16((const uint16_t *)from + index) : load((const float *)from + index);
}

void pack_keys(const float *keys, int64_t stride, int64_t length, int64_t width, void *packed, int bf16) {
    for (int64_t block = 0; block < round_up(length, LANES); block += LANES)
        for (int64_t k = 0; k < width; k++)
            for (int64_t i = 0; i < LANES; i++) {
                float key = block + i < length ? keys[(block + i) * stride + k] : 0.0f;
                int64_t index = (block * width) + k * LANES + i;
                if (bf16)
                    ((uint16_t *)packed)[index] = to_bf16(key);
                else
                    ((float *)packed)[index] = key;
            }
}

/* Softmax of `length` scores in place; the padding up to a multiple of LANES becomes 0. */
static void softmax(float *scores, int64_t length) {
    int64_t padded = round_up(length, LANES);
    for (int64_t i = length; i < padded; i++) scores[i] = -INFINITY;
    Vec largest = load(scores);
    for (int64_t i = LANES; i < padded; i += LANES) largest = vec_max(largest, load(scores + i));
    Vec maximum = splat(max_over_lanes(largest)), total = {0};
    for (int64_t i = 0; i < padded; i += LANES) {
        Vec weight = exponential(load(scores + i) - maximum);
        total += weight;
        store(scores + i, weight);
    }
    Vec factor = splat(1.0f / sum_over_lanes(total));
    for (int64_t i = 0; i < padded; i += LANES) store(scores + i, load(scores + i) * factor);
}

enum { CACHE_LINE = 64, PREFETCH_BYTES = 1024 }; /* bytes of a cache line, and prefetch distance in bytes */

INLINE const void *skip(const void *from, int64_t numbers, const int bf16) {
    return (const char *)from + numbers * (bf16 ? 2 : 4);
}

/* Prefetch `numbers` numbers into the cache. */
INLINE void prefetch(const void *from, int64_t numbers, const int bf16) {
    const char *end = skip(from, numbers, bf16);
    for (const char *line = from; line < end; line += CACHE_LINE) __builtin_prefetch(line);
}

/* One panel of the outputs of `count` queries: Σ weight · value, where `at` is the address of the values of position p.
 * Each value is loaded once for all queries. */
#define WEIGHTED_SUM(count, at, bf16)                                                                                  \
    Vec sum[4][TILE_VECTORS] = {{{0}}};                                                                                \
    const float *weight[4][TILE_VECTORS];                                                                              \
    for (int i = 0; i < count; i++)                                                                                    \
        for (int j = 0; j < TILE_VECTORS; j++)                                                                         \
            weight[i][j] = scores + (i * model->heads + (column + j * LANES) / model->head_width) * padded;            \
    for (int64_t p = 0; p < length; p++) {                                                                             \
        const void *values = at;                                                                                       \
        _Pragma("GCC unroll 4") for (int j = 0; j < TILE_VECTORS; j++) {                                               \
            Vec value = load_cached(values, j * LANES, bf16);                                                          \
            _Pragma("GCC unroll 4") for (int i = 0; i < count; i++) sum[i][j] += weight[i][j][p] * value;              \
        }                                                                                                              \
    }                                                                                                                  \
    for (int i = 0; i < count; i++)                                                                                    \
        for (int j = 0; j < TILE_VECTORS; j++) store(output + i * width + column + j * LANES, sum[i][j]);

INLINE void attention_to_source(const int count, const Model *model, const SourceCache *source, const float *q,
                                int64_t q_stride, float *output, float *scores, const int bf16) {
    const int64_t head = model->head_width, width = model->heads * head;
    const int64_t length = source->length, padded = round_up(length, LANES);
    enum { PARTS = 4 }; /* sums that do not wait for one another */
    for (int64_t block = 0; block < padded; block += LANES)
        for (int64_t h = 0; h < model->heads; h++) {
            Vec sum[4][PARTS] = {{{0}}};
            for (int64_t k = 0; k < head; k += PARTS) {
                int64_t ahead = block * width + (h * head + k) * LANES + PREFETCH_BYTES / (bf16 ? 2 : 4);
                prefetch(skip(source->keys, ahead, bf16), PARTS * LANES, bf16);
#pragma GCC unroll 4
                for (int part = 0; part < PARTS; part++) {
                    Vec key = load_cached(source->keys, block * width + (h * head + k + part) * LANES, bf16);
#pragma GCC unroll 4
                    for (int i = 0; i < count; i++) sum[i][part] += q[i * q_stride + h * head + k + part] * key;
                }
            }
            for (int i = 0; i < count; i++) {
                Vec total = sum[i][0];
                for (int part = 1; part < PARTS; part++) total += sum[i][part];
                store(scores + (i * model->heads + h) * padded + block, total);
            }
        }
    for (int64_t i = 0; i < count * model->heads; i++) softmax(scores + i * padded, length);
    for (int64_t column = 0; column < width; column += PANEL) {
        const void *values_of_panel = skip(source->values, column / PANEL * source->panel_stride, bf16);
        WEIGHTED_SUM(count, skip(values_of_panel, p * source->row_stride, bf16), bf16)
    }
}

void attend_to_source(const Model *model, const SourceCache *source, int64_t count, const float *q, int64_t q_stride,
                      float *output, float *scores) {
    const int64_t width = model->heads * model->head_width;
    int64_t block;
    for (int64_t i = 0; i < count; i += block, q += block * q_stride, output += block * width) {
        block = count - i >= 4 ? 4 : count - i >= 2 ? 2 : 1;
#define BLOCK(n)                                                                                                       \
    (source->bf16 ? attention_to_source(n, model, source, q, q_stride, output, scores, 1)                              \
                  : attention_to_source(n, model, source, q, q_stride, output, scores, 0))
        if (block == 4) BLOCK(4);
        else if (block == 2) BLOCK(2);
        else BLOCK(1);
    }
}

INLINE void attention_to_cache(const Model *model, const void *const *entries, int64_t length,
                               const void *const *next_entries, int64_t next_length, const float *q, float *output,
                               float *scores, const int bf16) {
    const int64_t head = model->head_width, width = model->heads * head, padded = round_up(length, LANES);
    for (int64_t block = 0; block < padded; block += LANES) {
        for (int64_t p = block; p < block + LANES && p < length; p++) {
            prefetch(skip(entries[p], width, bf16), width, bf16);
            if (p + LANES < length) prefetch(entries[p + LANES], width, bf16);
        }
        for (int64_t h = 0; h < model->heads; h++) {
            Vec part[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                const void *keys = entries[block + i < length ? block + i : length - 1];
                Vec sum = {0};
                for (int64_t k = h * head; k < (h + 1) * head; k += LANES)
                    sum += load(q + k) * load_cached(keys, k, bf16);
                part[i] = sum;
            }
            store(scores + h * padded + block, sum_lanes_of_each(part));
        }
    }
    for (int64_t p = 0; p < LANES && p < next_length; p++) prefetch(next_entries[p], width, bf16);
    for (int64_t h = 0; h < model->heads; h++) softmax(scores + h * padded, length);
    for (int64_t column = 0; column < width; column += PANEL) {
        WEIGHTED_SUM(1, skip(entries[p], width + column, bf16), bf16)
    }
}

void attend_to_cache(const Model *model, const void *const *entries, int64_t length, const void *const *next_entries,
                     int64_t next_length, const float *q, float *output, float *scores) {
    if (model->bf16_cache)
        attention_to_cache(model, entries, length, next_entries, next_length, q, output, scores, 1);
    else
        attention_to_cache(model, entries, length, next_entries, next_length, q, output, scores, 0);
}
