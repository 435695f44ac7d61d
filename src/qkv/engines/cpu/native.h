/* Structs shared with Python (qkv.engines.cpu.native_library mirrors every one), and functions shared by the .c files.
 *
 * All widths are padded with zeros to a multiple of PANEL, and the head width to a multiple of LANES, so that no loop
 * has a remainder. Rows are computed independently: the result of a row does not depend on the rest of the batch.
 */

#ifndef QKV_NATIVE_H
#define QKV_NATIVE_H

#include "vector.h"

/* Packed weight: panels of fp32 numbers [outputs / PANEL][inputs][PANEL] or, with scales, of int8 weights stored as
 * bytes from 1 to 255 with zero point 128, [outputs / PANEL][inputs / 4][PANEL][4]. */
typedef struct {
    const void *weight;
    const float *scale; /* quantisation scale of each output column; NULL: fp32 weights */
    const float *bias;  /* or NULL */
    int64_t inputs, outputs;
} Matrix;

typedef struct {
    const float *weight, *bias; /* weight NULL: identity; bias NULL: RMSNorm */
    double eps;
} Norm;

typedef struct {
    Matrix qkv, output;                                 /* self-attention: W^Q, W^K and W^V as one matrix, and W^O */
    Matrix cross_query, cross_key_value, cross_output;  /* encoder-decoder attention: W^Q; W^K and W^V; W^O */
    Matrix inner, gate, outer;                          /* feed-forward */
    Norm attention_norm, cross_norm, feed_forward_norm; /* norms */
} Layer;

typedef struct {
    const Layer *encoder, *decoder;
    int64_t encoder_layers, decoder_layers;
    Norm encoder_norm, decoder_norm;
    Matrix output;
    const float *source, *target; /* embedding tables scaled by √d_model: (vocabulary, width) */
    int64_t source_vocabulary, target_vocabulary;
    const float *mask; /* (width): 1 in the first d_model columns, 0 in the padding */
    int64_t d_model, width, heads, head_width, inner;
    int64_t norm_first, activation, bf16_cache; /* bf16_cache: keys and values are stored as bf16 */
} Model;

enum { RELU, GELU, SWIGLU };

enum { PAGE = 16 }; /* positions of a sentence in one page of the paged KV cache */

/* Decoder step: `n` new tokens for each of `beam` rows of every sentence; only `row_count` rows are computed. */
typedef struct {
    int64_t sentences, beam, n, row_count;
    const int64_t *rows;   /* (row_count): ascending indices of the rows to compute */
    const int64_t *tokens; /* (sentences · beam, n) */
    int64_t *length;       /* (sentences): tokens in the cache before this step */
    int32_t *origin;       /* (sentences · beam, capacity): cache indirection: beam that stores each position */
    int64_t capacity;
    void *const *pages; /* (sentences, pages per sentence): [layers][beam][PAGE][2][heads · head width] */
    int64_t pages_per_sentence;
    void *const *source; /* (sentences): keys and values written by `qkv_encode` */
    const int64_t *source_length;
    const float *positions, *rotary; /* (…, width) and (…, head width), or NULL */
    float *hidden;                   /* output (rows · n, d_model) of the last layer, or NULL to compute */
    float *logits;                   /* (rows · n, vocabulary); zeros in rows that are not computed */
    int64_t threads;
    void *scratch;
} DecoderStep;

typedef struct {
    int64_t sentences;
    const int64_t *tokens; /* of all sentences, packed without padding */
    const int64_t *starts; /* (sentences + 1): offset of the first token of each */
    void *const *source;   /* (sentences): output buffers of `qkv_source_size` bytes for keys and values */
    const float *positions, *rotary;
    int64_t threads;
    void *scratch;
} EncoderBatch;

/* SearchState of qkv.core.search, and the options of a search step. */
typedef struct {
    float *logits; /* (sentences · rows, vocabulary) */
    int64_t vocabulary, sentences, rows, n, capacity;
    const float *penalties; /* length penalty for each length without </s> */
    int64_t *tokens, *newest, *length;
    float *logprob;
    const int64_t *longest, *forced;
    uint8_t *done;
    int64_t *finished_tokens;
    float *finished_scores;
    int64_t pad, bos, eos, shortest;
    int64_t *parents; /* (sentences · rows): row that each row continues; NULL in greedy search */
} SearchStep;

int64_t qkv_step(const Model *model, const DecoderStep *step);

/* ---- threads ---- */

typedef void Task(void *data, int64_t first, int64_t end, int thread);

/* Run `task` on the range 0 to `size`, split among at most `threads` threads; `thread` is the number of the thread. */
void in_parallel(int64_t threads, int64_t size, Task *task, void *data);

/* ---- products ---- */

/* Left operand of a product: fp32 rows and, for int8 weights, their quantised copy. */
typedef struct {
    const float *x;
    int64_t rows, width;
    int8_t *quantised; /* (rows, width) */
    float *scale;      /* (rows): quantisation scale */
    int32_t *offset;   /* (rows): correction for the zero point of the weights, -128 · Σ quantised */
} Input;

/* Destination of a product, and operations fused into the store. */
typedef struct {
    float *y;
    int64_t row_stride, outputs; /* distance between rows in y; number of output columns to store */
    int relu, accumulate;        /* accumulate: add to y */
    const int64_t *rows;         /* row of y for each row of the product; NULL: the same row */
} Destination;

/* Prepare rows for a product with `matrix`; for int8 weights `memory` receives their quantised copy. */
Input quantise_input(const Matrix *matrix, const float *x, int64_t rows, void *memory);
size_t quantised_input_bytes(int64_t rows, int64_t width);
void product(const Input *x, const Matrix *matrix, Destination into, int64_t threads);

/* ---- attention ---- */

/* Keys and values of one sentence in one layer. Keys are interleaved in blocks of LANES positions,
 * [blocks][heads · head width][LANES]; values are stored in panels. */
typedef struct {
    const void *keys, *values;
    int64_t length;                   /* positions */
    int64_t row_stride, panel_stride; /* distance between positions in a panel of values, and between panels */
    int bf16;
} SourceCache;

/* Attention of `count` queries to one sentence; `scores` is scratch memory for 4 · heads · (length + LANES) numbers. */
void attend_to_source(const Model *model, const SourceCache *source, int64_t count, const float *q, int64_t q_stride,
                      float *output, float *scores);
/* Attention of one query to `length` cached positions: an entry holds the keys of a position, then its values.
 * `next_entries` are the entries of the next call; they are prefetched meanwhile. */
void attend_to_cache(const Model *model, const void *const *entries, int64_t length, const void *const *next_entries,
                     int64_t next_length, const float *q, float *output, float *scores);
/* Interleave keys (length, width), `stride` numbers apart, as SourceCache stores them. */
void pack_keys(const float *keys, int64_t stride, int64_t length, int64_t width, void *packed, int bf16);

INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

#endif
