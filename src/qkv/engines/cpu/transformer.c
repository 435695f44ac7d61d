/* The Transformer for the search: whole sources through the encoder, some tokens of each row through the decoder.
 *
 * Tokens of all rows lie end to end and nothing is padded. A row's own past lies in pages of its sentence, and a table
 * says which beam wrote each position of it: when beams go on from one another, the table changes and nothing is moved.
 */

#include "native.h"

#include <stdlib.h>

enum { TOGETHER = 256 }; /* source tokens that go through the encoder at a time */
enum { INSIDE = 1 << 19 }; /* bytes of the feed-forward's inner layer that are held at a time */

/* ---- memory ---- */

/* What the layers write to meanwhile, cut from one piece. */
typedef struct {
    float *x, *y, *parts, *found, *hidden, *gated;
    void *rounded, *own;
    int64_t threads, longest;
    size_t size;
} Room;

/* What each thread has of its own. */
typedef struct {
    float *scores, *keys;
    const void **past, **next;
    size_t size;
} Own;

static void *cut(void *memory, size_t *used, size_t bytes) {
    void *found = memory ? (char *)memory + *used : NULL;
    *used += (size_t)up((int64_t)bytes, 64);
    return found;
}

static int64_t rows_inside(const Model *model) {
    int64_t rows = INSIDE / (4 * model->inner) / TILE_ROWS * TILE_ROWS;
    return rows < TILE_ROWS ? TILE_ROWS : rows;
}

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static Own own(const Model *model, const Room *r, int thread) {
    Own o = {0};
    const int64_t padded = up(r->longest, LANES);
    char *memory = r->own;
    for (int i = 0; i <= thread; i++) {
        if (i && memory) memory += o.size;
        o.size = 0;
        o.scores = cut(memory, &o.size, sizeof(float) * 4 * model->heads * padded);
        o.keys = cut(memory, &o.size, sizeof(float) * model->heads * model->head * padded);
        o.past = cut(memory, &o.size, sizeof(void *) * r->longest);
        o.next = cut(memory, &o.size, sizeof(void *) * r->longest);
    }
    return o;
}

/* For so many tokens at once, none of which attends to more than `longest`. */
static Room room(const Model *model, int64_t tokens, int64_t longest, int64_t threads, void *memory) {
    Room r = {.threads = threads, .longest = longest};
    int64_t width = model->heads * model->head, inside = rows_inside(model);
    inside = inside < tokens ? inside : tokens;
    r.x = cut(memory, &r.size, sizeof(float) * tokens * model->width);
    r.y = cut(memory, &r.size, sizeof(float) * tokens * model->width);
    r.parts = cut(memory, &r.size, sizeof(float) * tokens * 3 * width);
    r.found = cut(memory, &r.size, sizeof(float) * tokens * width);
    r.hidden = cut(memory, &r.size, sizeof(float) * inside * model->inner);
    r.gated = cut(memory, &r.size, model->activation == SWIGLU ? sizeof(float) * inside * model->inner : 0);
    size_t rounded = most(input_size(tokens, most(model->width, width)), input_size(inside, model->inner));
    r.rounded = cut(memory, &r.size, rounded);
    r.own = cut(memory, &r.size, own(model, &r, 0).size * threads);
    return r;
}

/* ---- what is done at each position alone ---- */

static void normalise(const Model *model, const Norm *norm, const float *x, float *y, int64_t rows) {
    const int64_t width = model->width;
    for (int64_t r = 0; r < rows; r++, x += width, y += width) {
        Vec mean = {0}, squares = {0};
        if (norm->bias) {
            for (int64_t k = 0; k < width; k += LANES) mean += load(x + k);
            mean = splat(sum_of_lanes(mean) / (float)model->d_model);
        }
        for (int64_t k = 0; k < width; k += LANES) {
            Vec away = (load(x + k) - mean) * load(model->real + k);
            squares += away * away;
        }
        Vec by = splat((float)(1.0 / sqrt(sum_of_lanes(squares) / (double)model->d_model + norm->eps)));
        for (int64_t k = 0; k < width; k += LANES) {
            Vec normed = (load(x + k) - mean) * by * load(norm->weight + k);
            store(y + k, norm->bias ? normed + load(norm->bias + k) : normed);
        }
    }
}

/* What a sublayer reads: x itself or, with the norm before it, x normed. */
static const float *before(const Model *model, const Norm *norm, Room *r, int64_t rows) {
    if (!model->pre) return r->x;
    normalise(model, norm, r->x, r->y, rows);
    return r->y;
}

/* x has become x + sublayer: normed, if that comes behind. */
static void after(const Model *model, const Norm *norm, Room *r, int64_t rows) {
    if (!model->pre) normalise(model, norm, r->x, r->x, rows);
}

/* x Φ(x); the error function by Abramowitz and Stegun, 7.1.26, to 1.5e-7. */
INLINE Vec gelu(Vec x) {
    Vec z = magnitude(x) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * z);
    Vec series = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
    Vec erf = 1.0f - series * exponential(-z * z);
    Vec signed_erf = (Vec)((VecBits)erf | ((VecBits)x & 0x80000000u));
    return 0.5f * x * (1.0f + signed_erf);
}

static void activate(const Model *model, float *hidden, const float *gated, int64_t numbers) {
    if (model->activation == RELU) return; /* the product did it */
    for (int64_t i = 0; i < numbers; i += LANES) {
        Vec x = load(hidden + i);
        store(hidden + i, gated ? x / (1.0f + exponential(-x)) * load(gated + i) : gelu(x));
    }
}

static void multiply(Room *r, const Matrix *matrix, const float *x, int64_t rows, float *y, int add) {
    Input in = input(matrix, x, rows, r->rounded);
    product(&in, matrix, (Into){y, matrix->outputs, matrix->outputs, 0, add, NULL}, r->threads);
}

/* Some rows at a time, so that the inner layer stays near. */
static void feed_forward(const Model *model, const Layer *layer, Room *r, int64_t rows) {
    const float *y = before(model, &layer->feed_forward, r, rows);
    int64_t some = rows_inside(model), inner = model->inner;
    for (int64_t first = 0; first < rows; first += some) {
        int64_t now = rows - first < some ? rows - first : some;
        Input in = input(&layer->inner, y + first * model->width, now, r->rounded);
        product(&in, &layer->inner, (Into){r->hidden, inner, inner, model->activation == RELU, 0, NULL}, r->threads);
        if (model->activation == SWIGLU)
            product(&in, &layer->gate, (Into){r->gated, inner, inner, 0, 0, NULL}, r->threads);
        activate(model, r->hidden, model->activation == SWIGLU ? r->gated : NULL, now * inner);
        multiply(r, &layer->outer, r->hidden, now, r->x + first * model->width, 1);
    }
    after(model, &layer->feed_forward, r, rows);
}

static void embed(const Model *model, const float *table, int64_t token, const float *position, float *x) {
    for (int64_t k = 0; k < model->width; k += LANES) {
        Vec sum = load(table + token * model->width + k);
        store(x + k, position ? sum + load(position + k) : sum);
    }
}

/* Turn each pair of a query's or key's heads by the angle of its position: sine and cosine alternate in `table`. */
static void turn(const Model *model, const float *table, float *x) {
    for (int64_t h = 0; h < model->heads; h++, x += model->head)
        for (int64_t k = 0; k < model->head; k += 2) {
            float even = x[k], odd = x[k + 1], sine = table[k], cosine = table[k + 1];
            x[k] = even * cosine - odd * sine;
            x[k + 1] = even * sine + odd * cosine;
        }
}

static void turn_both(const Model *model, const float *table, float *parts, int64_t position) {
    if (!table) return;
    turn(model, table + position * model->head, parts);
    turn(model, table + position * model->head, parts + model->heads * model->head);
}

static void keep(const float *x, int64_t numbers, void *to, int half) {
    if (!half) memcpy(to, x, (size_t)numbers * sizeof(float));
    else
        for (int64_t i = 0; i < numbers; i++) ((uint16_t *)to)[i] = to_half(x[i]);
}

/* ---- the encoder ---- */

/* Of one layer: its keys side by side, then its values. */
static size_t read_size(const Model *model, int64_t length) {
    return (size_t)up((up(length, LANES) + length) * model->heads * model->head * (model->half ? 2 : 4), 64);
}

int64_t qkv_source_size(const Model *model, int64_t length) {
    return (int64_t)read_size(model, length) * model->decoder_layers;
}

static Source source_of(const Model *model, const void *memory, int64_t layer, int64_t length) {
    const int64_t width = model->heads * model->head;
    const char *keys = (const char *)memory + (size_t)layer * read_size(model, length);
    const char *values = keys + up(length, LANES) * width * (model->half ? 2 : 4);
    return (Source){keys, values, length, PANEL, length * PANEL, (int)model->half};
}

/* What a thread needs to know of a layer, an encoder's from its sentence `first` on. */
typedef struct {
    const Model *model;
    Room *r;
    const Encode *e;
    const Step *s;
    int64_t layer, first;
} Job;

static void attend_within(void *data, int64_t from, int64_t to, int thread) {
    const Job *job = data;
    const Model *model = job->model;
    const Encode *e = job->e;
    const int64_t width = model->heads * model->head, row = 3 * width;
    Own mine = own(model, job->r, thread);
    for (int64_t s = job->first + from; s < job->first + to; s++) {
        int64_t length = e->start[s + 1] - e->start[s], place = e->start[s] - e->start[job->first];
        float *parts = job->r->parts + place * row;
        for (int64_t i = 0; i < length; i++) turn_both(model, e->rotary, parts + i * row, i);
        lay_keys(parts + width, row, length, width, mine.keys, 0);
        Source itself = {mine.keys, parts + 2 * width, length, row, PANEL, 0};
        attend_to_source(model, &itself, length, parts, row, job->r->found + place * width, mine.scores);
    }
}

static void encoder_attention(const Model *model, const Layer *layer, const Encode *e, Room *r, int64_t first,
                              int64_t end) {
    const int64_t rows = e->start[end] - e->start[first];
    multiply(r, &layer->project, before(model, &layer->attention, r, rows), rows, r->parts, 0);
    in_parallel(r->threads, end - first, attend_within, &(Job){model, r, e, NULL, 0, first});
    multiply(r, &layer->output, r->found, rows, r->x, 1);
    after(model, &layer->attention, r, rows);
}

/* Keys and values of the sources for each layer of the decoder. */
static void read_sources(const Model *model, const Encode *e, Room *r, int64_t first, int64_t end) {
    const int64_t width = model->heads * model->head, begin = e->start[first], rows = e->start[end] - begin;
    const float *x = r->x;
    if (model->encoder_norm.weight) normalise(model, &model->encoder_norm, r->x, r->y, rows), x = r->y;
    Input in = input(&model->decoder[0].read, x, rows, r->rounded);
    for (int64_t layer = 0; layer < model->decoder_layers; layer++) {
        product(&in, &model->decoder[layer].read, (Into){r->parts, 2 * width, 2 * width, 0, 0, NULL}, r->threads);
        for (int64_t s = first; s < end; s++) {
            int64_t length = e->start[s + 1] - e->start[s];
            const float *parts = r->parts + (e->start[s] - begin) * 2 * width;
            Source to = source_of(model, e->source[s], layer, length);
            lay_keys(parts, 2 * width, length, width, (void *)to.keys, to.half);
            char *values = (char *)to.values;
            for (int64_t column = width; column < 2 * width; column += PANEL)
                for (int64_t i = 0; i < length; i++, values += PANEL * (to.half ? 2 : 4))
                    keep(parts + i * 2 * width + column, PANEL, values, to.half);
        }
    }
}

/* The sentences from `first` on that go through together; how many tokens they and the longest have. */
static int64_t together(const Encode *e, int64_t first, int64_t *tokens, int64_t *longest) {
    int64_t end = first;
    *longest = 0;
    while (end < e->sentences && (end == first || e->start[end + 1] - e->start[first] <= TOGETHER)) {
        *longest = most(*longest, e->start[end + 1] - e->start[end]);
        end++;
    }
    *tokens = e->start[end] - e->start[first];
    return end;
}

int64_t qkv_encode_size(const Model *model, const Encode *e) {
    int64_t size = 0, tokens, longest;
    for (int64_t first = 0; first < e->sentences;) {
        first = together(e, first, &tokens, &longest);
        size = most(size, (int64_t)room(model, tokens, longest, e->threads, NULL).size);
    }
    return size;
}

int64_t qkv_encode(const Model *model, const Encode *e) {
    int64_t tokens, longest, end;
    for (int64_t t = 0; t < e->start[e->sentences]; t++)
        if (e->tokens[t] < 0 || e->tokens[t] >= model->source_vocabulary) return 1;
    for (int64_t first = 0; first < e->sentences; first = end) {
        end = together(e, first, &tokens, &longest);
        Room r = room(model, tokens, longest, e->threads, e->scratch);
        for (int64_t s = first; s < end; s++)
            for (int64_t t = e->start[s]; t < e->start[s + 1]; t++) {
                const float *position = e->positions ? e->positions + (t - e->start[s]) * model->width : NULL;
                embed(model, model->source, e->tokens[t], position, r.x + (t - e->start[first]) * model->width);
            }
        for (int64_t layer = 0; layer < model->encoder_layers; layer++) {
            encoder_attention(model, model->encoder + layer, e, &r, first, end);
            feed_forward(model, model->encoder + layer, &r, tokens);
        }
        read_sources(model, e, &r, first, end);
    }
    return 0;
}

/* ---- the decoder ---- */

static void *entry(const Model *model, const Step *s, int64_t sentence, int64_t layer, int64_t beam, int64_t position) {
    int64_t place = (layer * s->beam + beam) * PAGE + position % PAGE;
    char *page = s->pages[sentence * s->pages_each + position / PAGE];
    return page + place * 2 * model->heads * model->head * (model->half ? 2 : 4);
}

/* Where the past of a row lies; how long it is. */
static int64_t past_of(const Model *model, int64_t layer, const Step *s, int64_t row, const void **past) {
    const int64_t sentence = row / s->beam, length = s->length[sentence];
    const int32_t *origin = s->origin + row * s->capacity;
    for (int64_t p = 0; p < length; p++) past[p] = entry(model, s, sentence, layer, origin[p], p);
    return length;
}

static void attend_back(void *data, int64_t first, int64_t end, int thread) {
    const Job *job = data;
    const Model *model = job->model;
    const Step *s = job->s;
    const int64_t width = model->heads * model->head, n = s->n;
    Own mine = own(model, job->r, thread);
    float *parts = job->r->parts + first * n * 3 * width, *found = job->r->found + first * n * width;
    int64_t next = past_of(model, job->layer, s, s->rows[first], mine.next);
    for (int64_t place = first; place < end; place++) {
        const int64_t length = next, row = s->rows[place];
        const void **past = mine.next;
        mine.next = mine.past, mine.past = past;
        next = place + 1 < end ? past_of(model, job->layer, s, s->rows[place + 1], mine.next) : 0;
        for (int64_t i = 0; i < n; i++, parts += 3 * width, found += width) {
            turn_both(model, s->rotary, parts, length + i);
            void *new = entry(model, s, row / s->beam, job->layer, row % s->beam, length + i);
            keep(parts + width, 2 * width, new, (int)model->half);
            past[length + i] = new;
            attend_to_past(model, past, length + i + 1, mine.next, next, parts, found, mine.scores);
        }
    }
}

/* All beams of a sentence read the same source: they are queries of one attention. */
static void attend_across(void *data, int64_t first, int64_t end, int thread) {
    const Job *job = data;
    const Step *s = job->s;
    const int64_t width = job->model->heads * job->model->head;
    Own mine = own(job->model, job->r, thread);
    for (int64_t next; first < end; first = next) {
        const int64_t sentence = s->rows[first] / s->beam, place = first * s->n * width;
        for (next = first + 1; next < end && s->rows[next] / s->beam == sentence;) next++;
        Source read = source_of(job->model, s->source[sentence], job->layer, s->source_length[sentence]);
        attend_to_source(job->model, &read, (next - first) * s->n, job->r->parts + place, width, job->r->found + place,
                         mine.scores);
    }
}

/* One of a decoder layer's attentions: the queries' matrix, how they attend, the output's matrix, and the norm. */
static void attention(const Model *model, int64_t layer, const Step *s, Room *r, const Matrix *ask, Work *attend,
                      const Matrix *output, const Norm *norm) {
    const int64_t tokens = s->count * s->n;
    multiply(r, ask, before(model, norm, r, tokens), tokens, r->parts, 0);
    in_parallel(r->threads, s->count, attend, &(Job){model, r, NULL, s, layer, 0});
    multiply(r, output, r->found, tokens, r->x, 1);
    after(model, norm, r, tokens);
}

static Room step_room(const Model *model, const Step *s, void *memory) {
    int64_t longest = 1;
    for (int64_t i = 0; i < s->sentences; i++) {
        longest = most(longest, s->length[i] + s->n);
        if (s->source) longest = most(longest, s->source_length[i]);
    }
    return room(model, s->sentences * s->beam * s->n, up(longest, PAGE), s->threads, memory); /* for later steps, too */
}

int64_t qkv_step_size(const Model *model, const Step *s) { return (int64_t)step_room(model, s, NULL).size; }

/* The last layer of all rows, or its logits; a row that is not computed has zeros. */
static void write_out(const Model *model, const Step *s, Room *r) {
    const int64_t rows = s->sentences * s->beam, tokens = s->count * s->n;
    const int64_t wide = s->hidden ? model->d_model : model->target_vocabulary;
    float *y = s->hidden ? s->hidden : s->logits;
    const float *x = r->x;
    if (model->decoder_norm.weight) normalise(model, &model->decoder_norm, r->x, r->y, tokens), x = r->y;
    const int64_t *places = s->count == rows ? NULL : s->rows; /* several tokens go to all rows */
    for (int64_t row = 0, next = 0; places && row < rows; row++)
        if (next < s->count && places[next] == row) next++;
        else memset(y + row * wide, 0, sizeof(float) * (size_t)wide);
    if (!s->hidden) {
        Input in = input(&model->output, x, tokens, r->rounded);
        product(&in, &model->output, (Into){y, wide, wide, 0, 0, places}, r->threads);
        return;
    }
    for (int64_t t = 0; t < tokens; t++)
        memcpy(y + (places ? places[t] : t) * wide, x + t * model->width, sizeof(float) * (size_t)wide);
}

int64_t qkv_step(const Model *model, const Step *s) {
    const int64_t rows = s->sentences * s->beam, tokens = s->count * s->n;
    for (int64_t t = 0; t < rows * s->n; t++)
        if (s->tokens[t] < 0 || s->tokens[t] >= model->target_vocabulary) return 1;
    Room r = step_room(model, s, s->scratch);
    for (int64_t place = 0; place < s->count; place++)
        for (int64_t i = 0, row = s->rows[place]; i < s->n; i++) {
            int64_t position = s->length[row / s->beam] + i;
            s->origin[row * s->capacity + position] = (int32_t)(row % s->beam);
            const float *there = s->positions ? s->positions + position * model->width : NULL;
            embed(model, model->target, s->tokens[row * s->n + i], there, r.x + (place * s->n + i) * model->width);
        }
    for (int64_t number = 0; number < model->decoder_layers; number++) {
        const Layer *layer = model->decoder + number;
        attention(model, number, s, &r, &layer->project, attend_back, &layer->output, &layer->attention);
        if (s->source) attention(model, number, s, &r, &layer->ask, attend_across, &layer->found, &layer->cross);
        feed_forward(model, layer, &r, tokens);
    }
    write_out(model, s, &r);
    return 0;
}

int64_t qkv_lanes(void) { return LANES; }
int64_t qkv_panel(void) { return PANEL; }
