/* What Python hands over (qkv.engines.cpu.native_library mirrors every struct) and what the files here call of each other.
 *
 * All widths are padded with zeros to a multiple of PANEL, and a head's to a multiple of LANES, so that no loop has a
 * rest. Rows are independent of one another: what is computed of one never depends on what else is in the batch.
 */

#ifndef QKV_NATIVE_H
#define QKV_NATIVE_H

#include "vector.h"

/* A weight in panels: [outputs / PANEL][inputs][PANEL] floats or, if it has scales, bytes from 1 to 255 around 128,
 * [outputs / PANEL][inputs / 4][PANEL][4]. */
typedef struct {
    const void *weight;
    const float *scale; /* for each output what its bytes count; none if they are floats */
    const float *bias;  /* or none */
    int64_t inputs, outputs;
} Matrix;

typedef struct {
    const float *weight, *bias; /* no weight: nothing is done; no bias: RMSNorm */
    double eps;
} Norm;

typedef struct {
    Matrix project, output;             /* self-attention: W^Q, W^K and W^V side by side, and W^O */
    Matrix ask, read, found;            /* encoder-decoder attention: W^Q; W^K and W^V; W^O */
    Matrix inner, gate, outer;          /* feed-forward */
    Norm attention, cross, feed_forward; /* norms */
} Layer;

typedef struct {
    const Layer *encoder, *decoder;
    int64_t encoder_layers, decoder_layers;
    Norm encoder_norm, decoder_norm;
    Matrix output;
    const float *source, *target; /* embeddings, times √d_model: (vocabulary, width) */
    int64_t source_vocabulary, target_vocabulary;
    const float *real; /* (width): 1 where a number is one, 0 where it is padding */
    int64_t d_model, width, heads, head, inner;
    int64_t pre, activation, half; /* half: keys and values are kept as bf16 */
} Model;

enum { RELU, GELU, SWIGLU };

enum { PAGE = 16 }; /* positions of a sentence's own past in one piece of memory */

/* Sentences of `beam` rows each, which all get `n` tokens more; only `count` of the rows are computed. */
typedef struct {
    int64_t sentences, beam, n, count;
    const int64_t *rows;    /* (count): which, in their order */
    const int64_t *tokens;  /* (sentences · beam, n) */
    int64_t *length;        /* (sentences): tokens before these */
    int32_t *origin;        /* (sentences · beam, capacity): in which beam's entry each position of a row lies */
    int64_t capacity;
    void *const *pages;     /* (sentences, pages each): [layers][beam][PAGE][2][heads · head] */
    int64_t pages_each;
    void *const *source;    /* (sentences): what `qkv_encode` wrote */
    const int64_t *source_length;
    const float *positions, *rotary; /* (…, width) and (…, head), or none */
    float *hidden;          /* (rows · n, d_model) if it is wanted, else */
    float *logits;          /* (rows · n, vocabulary); zeros of rows that are not computed */
    int64_t threads;
    void *scratch;
} Step;

typedef struct {
    int64_t sentences;
    const int64_t *tokens; /* of all sentences, end to end */
    const int64_t *start;  /* (sentences + 1): where each begins */
    void *const *source;   /* (sentences): room for keys and values, `qkv_source_size` bytes each */
    const float *positions, *rotary;
    int64_t threads;
    void *scratch;
} Encode;

/* The SearchState of qkv.core.search, and the options of its steps. */
typedef struct {
    float *logits; /* (sentences · rows, vocabulary) */
    int64_t vocabulary, sentences, rows, n, capacity;
    const float *penalties; /* by length, </s> not counted */
    int64_t *tokens, *newest, *length;
    float *logprob;
    const int64_t *longest, *forced;
    uint8_t *done;
    int64_t *finished_tokens;
    float *finished_scores;
    int64_t pad, bos, eos, shortest;
    int64_t *chosen; /* (sentences · rows): which row each goes on from; none if each goes its own way */
} Search;

int64_t qkv_step(const Model *model, const Step *step);

/* ---- threads ---- */

typedef void Work(void *data, int64_t first, int64_t end, int thread);

/* The work on 0 to `size`, in parts on up to so many threads; `thread` is below that. */
void in_parallel(int64_t threads, int64_t size, Work *work, void *data);

/* ---- products ---- */

/* Rows that are multiplied: as they are or, for weights that are bytes, rounded to bytes. */
typedef struct {
    const float *x;
    int64_t rows, width;
    int8_t *bytes;  /* (rows, width) */
    float *scale;   /* (rows): what a byte counts */
    int32_t *shift; /* (rows): what the weights' being 128 too large adds, negative */
} Input;

/* Where a product goes, and what is done on the way. */
typedef struct {
    float *y;
    int64_t row, outputs; /* numbers from one row to the next; outputs that are wanted */
    int relu, add;        /* add: to what is there */
    const int64_t *rows;  /* which row each is there, if another */
} Into;

/* The input, rounded into memory for it if it must be; `size` bytes of it are needed. */
Input input(const Matrix *for_matrix, const float *x, int64_t rows, void *memory);
size_t input_size(int64_t rows, int64_t width);
void product(const Input *x, const Matrix *matrix, Into into, int64_t threads);

/* ---- attention ---- */

/* Keys of a source, blocks of LANES positions side by side, [blocks][heads · head][LANES], and values in panels. */
typedef struct {
    const void *keys, *values;
    int64_t length;     /* positions */
    int64_t row, panel; /* numbers from one position's values to the next's, and from one panel of them to the next */
    int half;
} Source;

/* `count` queries q to one source; `scores` is memory for 4 · heads · (length + LANES) numbers. */
void attend_to_source(const Model *model, const Source *source, int64_t count, const float *q, int64_t q_row,
                      float *found, float *scores);
/* One query to `length` positions that lie where `past` says: keys there, and values behind them. `next` are the first
 * that will be asked for next: they are on their way meanwhile. */
void attend_to_past(const Model *model, const void *const *past, int64_t length, const void *const *next,
                    int64_t next_length, const float *q, float *found, float *scores);
/* Keys (length, row apart) as a source has them. */
void lay_keys(const float *keys, int64_t row, int64_t length, int64_t width, void *to, int half);

INLINE int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

#endif
