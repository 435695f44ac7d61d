/* Transformer inference for the search: the encoder on whole sources, the decoder on the next tokens of each row.
 *
 * Tokens are packed without padding. Each sentence has a paged KV cache, and a cache indirection table gives the beam
 * that stores each position of a row: reordering beams changes the table and copies no keys or values.
 */

#include "native.h"

#include <stdlib.h>

enum { ENCODER_TOKENS = 256 }; /* source tokens that the encoder computes at a time */
enum { HIDDEN_BYTES = 1 << 19 }; /* bytes of hidden feed-forward activations that are computed at a time */

/* ---- memory ---- */

/* Buffers for the activations of a layer, allocated from one block of memory. */
typedef struct {
    float *x, *y, *qkv, *attended, *hidden, *gate;
    void *quantised, *thread_memory;
    int64_t threads, longest;
    size_t size;
} Workspace;

/* Buffers of one thread. */
typedef struct {
    float *scores, *keys;
    const void **entries, **next;
    size_t size;
} ThreadWorkspace;

/* Return the next `bytes` bytes of a block of memory; without memory, only count them. */
static void *allocate(void *memory, size_t *used, size_t bytes) {
    void *address = memory ? (char *)memory + *used : NULL;
    *used += (size_t)round_up((int64_t)bytes, 64);
    return address;
}

static int64_t feed_forward_rows(const Model *model) {
    int64_t rows = HIDDEN_BYTES / (4 * model->inner) / TILE_ROWS * TILE_ROWS;
    return rows < TILE_ROWS ? TILE_ROWS : rows;
}

static int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

/* Return the buffers of one thread; the buffers of all threads follow each other in memory. */
static ThreadWorkspace thread_workspace(const Model *model, const Workspace *w, int thread) {
    ThreadWorkspace o = {0};
    const int64_t padded = round_up(w->longest, LANES);
    char *memory = w->thread_memory;
    for (int i = 0; i <= thread; i++) {
        if (i && memory) memory += o.size;
        o.size = 0;
        o.scores = allocate(memory, &o.size, sizeof(float) * 4 * model->heads * padded);
        o.keys = allocate(memory, &o.size, sizeof(float) * model->heads * model->head_width * padded);
        o.entries = allocate(memory, &o.size, sizeof(void *) * w->longest);
        o.next = allocate(memory, &o.size, sizeof(void *) * w->longest);
    }
    return o;
}

/* Allocate the buffers for `tokens` tokens that attend to at most `longest` positions each; without memory, compute the
 * size only. */
static Workspace workspace(const Model *model, int64_t tokens, int64_t longest, int64_t threads, void *memory) {
    Workspace w = {.threads = threads, .longest = longest};
    int64_t width = model->heads * model->head_width, hidden_rows = feed_forward_rows(model);
    hidden_rows = hidden_rows < tokens ? hidden_rows : tokens;
    w.x = allocate(memory, &w.size, sizeof(float) * tokens * model->width);
    w.y = allocate(memory, &w.size, sizeof(float) * tokens * model->width);
    w.qkv = allocate(memory, &w.size, sizeof(float) * tokens * 3 * width);
    w.attended = allocate(memory, &w.size, sizeof(float) * tokens * width);
    w.hidden = allocate(memory, &w.size, sizeof(float) * hidden_rows * model->inner);
    w.gate = allocate(memory, &w.size, model->activation == SWIGLU ? sizeof(float) * hidden_rows * model->inner : 0);
    size_t quantised_bytes = max_of(quantised_input_bytes(tokens, max_of(model->width, width)),
                                    quantised_input_bytes(hidden_rows, model->inner));
    w.quantised = allocate(memory, &w.size, quantised_bytes);
    w.thread_memory = allocate(memory, &w.size, thread_workspace(model, &w, 0).size * threads);
    return w;
}

/* ---- position-wise parts ---- */

static void normalise(const Model *model, const Norm *norm, const float *x, float *y, int64_t rows) {
    const int64_t width = model->width;
    for (int64_t r = 0; r < rows; r++, x += width, y += width) {
        Vec mean = {0}, squares = {0};
        if (norm->bias) {
            for (int64_t k = 0; k < width; k += LANES) mean += load(x + k);
            mean = splat(sum_over_lanes(mean) / (float)model->d_model);
        }
        for (int64_t k = 0; k < width; k += LANES) {
            Vec centred = (load(x + k) - mean) * load(model->mask + k);
            squares += centred * centred;
        }
        Vec factor = splat((float)(1.0 / sqrt(sum_over_lanes(squares) / (double)model->d_model + norm->eps)));
        for (int64_t k = 0; k < width; k += LANES) {
            Vec normed = (load(x + k) - mean) * factor * load(norm->weight + k);
            store(y + k, norm->bias ? normed + load(norm->bias + k) : normed);
        }
    }
}

/* Input of a sublayer: x or, in pre-norm, the normalised x. */
static const float *norm_before(const Model *model, const Norm *norm, Workspace *w, int64_t rows) {
    if (!model->norm_first) return w->x;
    normalise(model, norm, w->x, w->y, rows);
    return w->y;
}

/* In post-norm, normalise the residual sum x + sublayer(x) in place. */
static void norm_after(const Model *model, const Norm *norm, Workspace *w, int64_t rows) {
    if (!model->norm_first) normalise(model, norm, w->x, w->x, rows);
}

/* x Φ(x) (GELU); error function by Abramowitz and Stegun 7.1.26, absolute error 1.5e-7. */
INLINE Vec gelu(Vec x) {
    Vec z = vec_abs(x) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * z);
    Vec series = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
    Vec erf = 1.0f - series * exponential(-z * z);
    Vec signed_erf = (Vec)((VecBits)erf | ((VecBits)x & 0x80000000u));
    return 0.5f * x * (1.0f + signed_erf);
}

static void activate(const Model *model, float *hidden, const float *gate, int64_t numbers) {
    if (model->activation == RELU) return; /* fused into the product */
    for (int64_t i = 0; i < numbers; i += LANES) {
        Vec x = load(hidden + i);
        store(hidden + i, gate ? x / (1.0f + exponential(-x)) * load(gate + i) : gelu(x));
    }
}

/* Write x times the matrix to y, or add it to y. */
static void multiply(Workspace *w, const Matrix *matrix, const float *x, int64_t rows, float *y, int add) {
    Input in = quantise_input(matrix, x, rows, w->quantised);
    product(&in, matrix, (Destination){y, matrix->outputs, matrix->outputs, 0, add, NULL}, w->threads);
}

/* Feed-forward sublayer on blocks of rows, so that the hidden activations stay in the cache. */
static void feed_forward(const Model *model, const Layer *layer, Workspace *w, int64_t rows) {
    const float *y = norm_before(model, &layer->feed_forward_norm, w, rows);
    int64_t block = feed_forward_rows(model), inner = model->inner;
    for (int64_t first = 0; first < rows; first += block) {
        int64_t block_rows = rows - first < block ? rows - first : block;
        Input in = quantise_input(&layer->inner, y + first * model->width, block_rows, w->quantised);
        Destination hidden = {w->hidden, inner, inner, model->activation == RELU, 0, NULL};
        product(&in, &layer->inner, hidden, w->threads);
        if (model->activation == SWIGLU)
            product(&in, &layer->gate, (Destination){w->gate, inner, inner, 0, 0, NULL}, w->threads);
        activate(model, w->hidden, model->activation == SWIGLU ? w->gate : NULL, block_rows * inner);
        multiply(w, &layer->outer, w->hidden, block_rows, w->x + first * model->width, 1);
    }
    norm_after(model, &layer->feed_forward_norm, w, rows);
}

static void embed(const Model *model, const float *table, int64_t token, const float *position, float *x) {
    for (int64_t k = 0; k < model->width; k += LANES) {
        Vec sum = load(table + token * model->width + k);
        store(x + k, position ? sum + load(position + k) : sum);
    }
}

/* Rotary positions: rotate each pair of numbers of every head; sine and cosine alternate in `table`. */
static void rotate(const Model *model, const float *table, float *x) {
    for (int64_t h = 0; h < model->heads; h++, x += model->head_width)
        for (int64_t k = 0; k < model->head_width; k += 2) {
            float even = x[k], odd = x[k + 1], sine = table[k], cosine = table[k + 1];
            x[k] = even * cosine - odd * sine;
            x[k + 1] = even * sine + odd * cosine;
        }
}

static void rotate_query_and_key(const Model *model, const float *table, float *qkv, int64_t position) {
    if (!table) return;
    rotate(model, table + position * model->head_width, qkv);
    rotate(model, table + position * model->head_width, qkv + model->heads * model->head_width);
}

static void store_cached(const float *x, int64_t numbers, void *to, int bf16) {
    if (!bf16) memcpy(to, x, (size_t)numbers * sizeof(float));
    else
        for (int64_t i = 0; i < numbers; i++) ((uint16_t *)to)[i] = to_bf16(x[i]);
}

/* ---- the encoder ---- */

/* Bytes of a source in one layer: interleaved keys, then values. */
static size_t source_layer_bytes(const Model *model, int64_t length) {
    const int64_t numbers = (round_up(length, LANES) + length) * model->heads * model->head_width;
    return (size_t)round_up(numbers * (model->bf16_cache ? 2 : 4), 64);
}

int64_t qkv_source_size(const Model *model, int64_t length) {
    return (int64_t)source_layer_bytes(model, length) * model->decoder_layers;
}

static SourceCache source_cache(const Model *model, const void *memory, int64_t layer, int64_t length) {
    const int64_t width = model->heads * model->head_width;
    const char *keys = (const char *)memory + (size_t)layer * source_layer_bytes(model, length);
    const char *values = keys + round_up(length, LANES) * width * (model->bf16_cache ? 2 : 4);
    return (SourceCache){keys, values, length, PANEL, length * PANEL, (int)model->bf16_cache};
}

/* Arguments of an attention task for one layer; an encoder task starts at the sentence `first`. */
typedef struct {
    const Model *model;
    Workspace *w;
    const EncoderBatch *e;
    const DecoderStep *s;
    int64_t layer, first;
} Job;

/* Thread task: encoder self-attention of the sentences `from` to `to` of the batch. */
static void encoder_self_attention(void *data, int64_t from, int64_t to, int thread) {
    const Job *job = data;
    const Model *model = job->model;
    const EncoderBatch *e = job->e;
    const int64_t width = model->heads * model->head_width, row = 3 * width;
    ThreadWorkspace own = thread_workspace(model, job->w, thread);
    for (int64_t s = job->first + from; s < job->first + to; s++) {
        int64_t length = e->starts[s + 1] - e->starts[s], place = e->starts[s] - e->starts[job->first];
        float *qkv = job->w->qkv + place * row;
        for (int64_t i = 0; i < length; i++) rotate_query_and_key(model, e->rotary, qkv + i * row, i);
        pack_keys(qkv + width, row, length, width, own.keys, 0);
        SourceCache cache = {own.keys, qkv + 2 * width, length, row, PANEL, 0};
        attend_to_source(model, &cache, length, qkv, row, job->w->attended + place * width, own.scores);
    }
}

static void encoder_attention(const Model *model, const Layer *layer, const EncoderBatch *e, Workspace *w,
                              int64_t first, int64_t end) {
    const int64_t rows = e->starts[end] - e->starts[first];
    multiply(w, &layer->qkv, norm_before(model, &layer->attention_norm, w, rows), rows, w->qkv, 0);
    in_parallel(w->threads, end - first, encoder_self_attention, &(Job){model, w, e, NULL, 0, first});
    multiply(w, &layer->output, w->attended, rows, w->x, 1);
    norm_after(model, &layer->attention_norm, w, rows);
}

/* Compute keys and values of the sources for each decoder layer. */
static void project_sources(const Model *model, const EncoderBatch *e, Workspace *w, int64_t first, int64_t end) {
    const int64_t width = model->heads * model->head_width, begin = e->starts[first], rows = e->starts[end] - begin;
    const float *x = w->x;
    if (model->encoder_norm.weight) normalise(model, &model->encoder_norm, w->x, w->y, rows), x = w->y;
    Input in = quantise_input(&model->decoder[0].cross_key_value, x, rows, w->quantised);
    for (int64_t layer = 0; layer < model->decoder_layers; layer++) {
        Destination keys_values = {w->qkv, 2 * width, 2 * width, 0, 0, NULL};
        product(&in, &model->decoder[layer].cross_key_value, keys_values, w->threads);
        for (int64_t s = first; s < end; s++) {
            int64_t length = e->starts[s + 1] - e->starts[s];
            const float *qkv = w->qkv + (e->starts[s] - begin) * 2 * width;
            SourceCache to = source_cache(model, e->source[s], layer, length);
            pack_keys(qkv, 2 * width, length, width, (void *)to.keys, to.bf16);
            char *values = (char *)to.values;
            for (int64_t column = width; column < 2 * width; column += PANEL)
                for (int64_t i = 0; i < length; i++, values += PANEL * (to.bf16 ? 2 : 4))
                    store_cached(qkv + i * 2 * width + column, PANEL, values, to.bf16);
        }
    }
}

/* Return the end of the encoder batch that starts at sentence `first`; write its tokens and its longest sentence. */
static int64_t next_encoder_batch(const EncoderBatch *e, int64_t first, int64_t *tokens, int64_t *longest) {
    int64_t end = first;
    *longest = 0;
    while (end < e->sentences && (end == first || e->starts[end + 1] - e->starts[first] <= ENCODER_TOKENS)) {
        *longest = max_of(*longest, e->starts[end + 1] - e->starts[end]);
        end++;
    }
    *tokens = e->starts[end] - e->starts[first];
    return end;
}

int64_t qkv_encode_size(const Model *model, const EncoderBatch *e) {
    int64_t size = 0, tokens, longest;
    for (int64_t first = 0; first < e->sentences;) {
        first = next_encoder_batch(e, first, &tokens, &longest);
        size = max_of(size, (int64_t)workspace(model, tokens, longest, e->threads, NULL).size);
    }
    return size;
}

int64_t qkv_encode(const Model *model, const EncoderBatch *e) {
    int64_t tokens, longest, end;
    for (int64_t t = 0; t < e->starts[e->sentences]; t++)
        if (e->tokens[t] < 0 || e->tokens[t] >= model->source_vocabulary) return 1;
    for (int64_t first = 0; first < e->sentences; first = end) {
        end = next_encoder_batch(e, first, &tokens, &longest);
        Workspace w = workspace(model, tokens, longest, e->threads, e->scratch);
        for (int64_t s = first; s < end; s++)
            for (int64_t t = e->starts[s]; t < e->starts[s + 1]; t++) {
                const float *position = e->positions ? e->positions + (t - e->starts[s]) * model->width : NULL;
                embed(model, model->source, e->tokens[t], position, w.x + (t - e->starts[first]) * model->width);
            }
        for (int64_t layer = 0; layer < model->encoder_layers; layer++) {
            encoder_attention(model, model->encoder + layer, e, &w, first, end);
            feed_forward(model, model->encoder + layer, &w, tokens);
        }
        project_sources(model, e, &w, first, end);
    }
    return 0;
}

/* ---- the decoder ---- */

/* Return the address of the keys and values of one position in a page of the KV cache. */
static void *cache_entry(const Model *model, const DecoderStep *s, int64_t sentence, int64_t layer, int64_t beam,
                         int64_t position) {
    int64_t place = (layer * s->beam + beam) * PAGE + position % PAGE;
    char *page = s->pages[sentence * s->pages_per_sentence + position / PAGE];
    return page + place * 2 * model->heads * model->head_width * (model->bf16_cache ? 2 : 4);
}

/* Write the cache entries of the previous positions of a row; return their number. */
static int64_t cache_entries(const Model *model, int64_t layer, const DecoderStep *s, int64_t row,
                             const void **entries) {
    const int64_t sentence = row / s->beam, length = s->length[sentence];
    const int32_t *origin = s->origin + row * s->capacity;
    for (int64_t p = 0; p < length; p++) entries[p] = cache_entry(model, s, sentence, layer, origin[p], p);
    return length;
}

/* Thread task: store the keys and values of the new tokens in the cache, and compute their self-attention. */
static void decoder_self_attention(void *data, int64_t first, int64_t end, int thread) {
    const Job *job = data;
    const Model *model = job->model;
    const DecoderStep *s = job->s;
    const int64_t width = model->heads * model->head_width, n = s->n;
    ThreadWorkspace own = thread_workspace(model, job->w, thread);
    float *qkv = job->w->qkv + first * n * 3 * width, *attended = job->w->attended + first * n * width;
    int64_t next = cache_entries(model, job->layer, s, s->rows[first], own.next);
    for (int64_t place = first; place < end; place++) {
        const int64_t length = next, row = s->rows[place];
        const void **entries = own.next;
        own.next = own.entries, own.entries = entries;
        next = place + 1 < end ? cache_entries(model, job->layer, s, s->rows[place + 1], own.next) : 0;
        for (int64_t i = 0; i < n; i++, qkv += 3 * width, attended += width) {
            rotate_query_and_key(model, s->rotary, qkv, length + i);
            void *new = cache_entry(model, s, row / s->beam, job->layer, row % s->beam, length + i);
            store_cached(qkv + width, 2 * width, new, (int)model->bf16_cache);
            entries[length + i] = new;
            attend_to_cache(model, entries, length + i + 1, own.next, next, qkv, attended, own.scores);
        }
    }
}

/* Thread task: encoder-decoder attention. The beams of a sentence share its keys and values in one call. */
static void cross_attention(void *data, int64_t first, int64_t end, int thread) {
    const Job *job = data;
    const DecoderStep *s = job->s;
    const int64_t width = job->model->heads * job->model->head_width;
    ThreadWorkspace own = thread_workspace(job->model, job->w, thread);
    for (int64_t next; first < end; first = next) {
        const int64_t sentence = s->rows[first] / s->beam, place = first * s->n * width;
        for (next = first + 1; next < end && s->rows[next] / s->beam == sentence;) next++;
        SourceCache cache = source_cache(job->model, s->source[sentence], job->layer, s->source_length[sentence]);
        attend_to_source(job->model, &cache, (next - first) * s->n, job->w->qkv + place, width,
                         job->w->attended + place, own.scores);
    }
}

/* An attention sublayer of the decoder: query projection, attention task, output projection and norm. */
static void decoder_attention(const Model *model, int64_t layer, const DecoderStep *s, Workspace *w,
                              const Matrix *query, Task *attend, const Matrix *output, const Norm *norm) {
    const int64_t tokens = s->row_count * s->n;
    multiply(w, query, norm_before(model, norm, w, tokens), tokens, w->qkv, 0);
    in_parallel(w->threads, s->row_count, attend, &(Job){model, w, NULL, s, layer, 0});
    multiply(w, output, w->attended, tokens, w->x, 1);
    norm_after(model, norm, w, tokens);
}

static Workspace step_workspace(const Model *model, const DecoderStep *s, void *memory) {
    int64_t longest = 1;
    for (int64_t i = 0; i < s->sentences; i++) {
        longest = max_of(longest, s->length[i] + s->n);
        if (s->source) longest = max_of(longest, s->source_length[i]);
    }
    const int64_t tokens = s->sentences * s->beam * s->n;
    return workspace(model, tokens, round_up(longest, PAGE), s->threads, memory); /* enough until a page is full */
}

int64_t qkv_step_size(const Model *model, const DecoderStep *s) { return (int64_t)step_workspace(model, s, NULL).size; }

/* Write the output of the last layer or its logits; rows that are not computed are set to zero. */
static void write_output(const Model *model, const DecoderStep *s, Workspace *w) {
    const int64_t rows = s->sentences * s->beam, tokens = s->row_count * s->n;
    const int64_t output_width = s->hidden ? model->d_model : model->target_vocabulary;
    float *y = s->hidden ? s->hidden : s->logits;
    const float *x = w->x;
    if (model->decoder_norm.weight) normalise(model, &model->decoder_norm, w->x, w->y, tokens), x = w->y;
    const int64_t *places = s->row_count == rows ? NULL : s->rows; /* NULL: all rows are computed */
    for (int64_t row = 0, next = 0; places && row < rows; row++)
        if (next < s->row_count && places[next] == row) next++;
        else memset(y + row * output_width, 0, sizeof(float) * (size_t)output_width);
    if (!s->hidden) {
        Input in = quantise_input(&model->output, x, tokens, w->quantised);
        product(&in, &model->output, (Destination){y, output_width, output_width, 0, 0, places}, w->threads);
        return;
    }
    for (int64_t t = 0; t < tokens; t++)
        memcpy(y + (places ? places[t] : t) * output_width, x + t * model->width, sizeof(float) * (size_t)output_width);
}

int64_t qkv_step(const Model *model, const DecoderStep *s) {
    const int64_t rows = s->sentences * s->beam, tokens = s->row_count * s->n;
    for (int64_t t = 0; t < rows * s->n; t++)
        if (s->tokens[t] < 0 || s->tokens[t] >= model->target_vocabulary) return 1;
    Workspace w = step_workspace(model, s, s->scratch);
    for (int64_t place = 0; place < s->row_count; place++)
        for (int64_t i = 0, row = s->rows[place]; i < s->n; i++) {
            int64_t position = s->length[row / s->beam] + i;
            s->origin[row * s->capacity + position] = (int32_t)(row % s->beam);
            const float *encoding = s->positions ? s->positions + position * model->width : NULL;
            embed(model, model->target, s->tokens[row * s->n + i], encoding, w.x + (place * s->n + i) * model->width);
        }
    for (int64_t number = 0; number < model->decoder_layers; number++) {
        const Layer *layer = model->decoder + number;
        decoder_attention(model, number, s, &w, &layer->qkv, decoder_self_attention, &layer->output,
                          &layer->attention_norm);
        if (s->source)
            decoder_attention(model, number, s, &w, &layer->cross_query, cross_attention, &layer->cross_output,
                              &layer->cross_norm);
        feed_forward(model, layer, &w, tokens);
    }
    write_output(model, s, &w);
    return 0;
}

int64_t qkv_lanes(void) { return LANES; }
int64_t qkv_panel(void) { return PANEL; }
