/* Matrix products: input rows times a packed weight, computed in register tiles by a micro-kernel.
 *
 * int8 products quantise each input row with its own scale; a weight has a quantisation scale for each output column.
 */

#include "native.h"

enum { L2_INPUT_BYTES = 1 << 18 };    /* input rows that stay in the L2 cache while the weight is read */
enum { MIN_PARALLEL_WORK = 1 << 20 }; /* int8 multiply-adds; a smaller product ends before another thread starts */

size_t quantised_input_bytes(int64_t rows, int64_t width) {
    return (size_t)(round_up(rows * width, 64) + round_up(rows * 8, 64) + 64);
}

/* Largest magnitude in a row, or NaN if the row has one: magnitudes are compared as bits, where NaN is the largest. */
static float largest_magnitude(const float *x, int64_t width) {
    VecBits largest = {0};
    for (int64_t k = 0; k < width; k += LANES) {
        VecBits bits = (VecBits)vec_abs(load(x + k));
#if defined(__AVX512F__)
        largest = (VecBits)_mm512_max_epu32((__m512i)largest, (__m512i)bits);
#else
        VecBits greater = (VecBits)(bits > largest);
        largest = (greater & bits) | (~greater & largest);
#endif
    }
    uint32_t bits_of_largest = 0;
    for (int i = 0; i < LANES; i++) bits_of_largest = largest[i] > bits_of_largest ? largest[i] : bits_of_largest;
    float number;
    memcpy(&number, &bits_of_largest, sizeof number);
    return number;
}

static void quantise_row(const float *x, int64_t width, int8_t *quantised, float *scale, int32_t *offset) {
    float largest = largest_magnitude(x, width), factor = largest > 0 ? 127.0f / largest : largest; /* NaN stays NaN */
    uint32_t sum = 0; /* unsigned: the sum may overflow if the row has NaN, and is not used then */
    typedef int8_t VecByte __attribute__((vector_size(LANES)));
    VecBits total = {0};
    for (int64_t k = 0; k < width; k += LANES) {
        Vec scaled = load(x + k) * factor + 12582912.0f; /* adding 1.5 · 2²³ rounds to an integer */
        VecInt rounded = (VecInt)scaled - 0x4b400000;
        total += (VecBits)rounded;
        VecByte packed = __builtin_convertvector(rounded, VecByte);
        memcpy(quantised + k, &packed, sizeof packed);
    }
    for (int i = 0; i < LANES; i++) sum += total[i];
    *scale = largest / 127.0f;
    *offset = (int32_t)(0u - 128u * sum);
}

Input quantise_input(const Matrix *matrix, const float *x, int64_t rows, void *memory) {
    Input in = {.x = x, .rows = rows, .width = matrix->inputs};
    if (matrix->scale) {
        in.quantised = memory;
        in.scale = (float *)(in.quantised + round_up(rows * in.width, 64));
        in.offset = (int32_t *)(in.scale + rows);
        for (int64_t r = 0; r < rows; r++)
            quantise_row(x + r * in.width, in.width, in.quantised + r * in.width, in.scale + r, in.offset + r);
    }
    return in;
}

/* Add bias and previous content to a vector of a tile, apply ReLU, and store the columns inside the matrix. */
INLINE void store_outputs(Vec sum, const Matrix *matrix, int64_t output, Destination into, int64_t row) {
    int64_t remaining = into.outputs - output;
    if (remaining <= 0) return;
    float *y = into.y + (into.rows ? into.rows[row] : row) * into.row_stride + output;
    if (matrix->bias) sum += load(matrix->bias + output);
    float partial[LANES];
    if (into.accumulate) {
        if (remaining >= LANES) {
            sum += load(y);
        } else {
            memset(partial, 0, sizeof partial);
            memcpy(partial, y, (size_t)remaining * sizeof(float));
            sum += load(partial);
        }
    }
    if (into.relu) sum = vec_max(splat(0.0f), sum);
    if (remaining >= LANES) {
        store(y, sum);
    } else {
        store(partial, sum);
        memcpy(y, partial, (size_t)remaining * sizeof(float));
    }
}

INLINE void tile_fp32(const int rows, const Input *x, int64_t row, const Matrix *matrix, int64_t output,
                      Destination into) {
    Vec sum[TILE_ROWS][TILE_VECTORS] = {{{0}}};
    const float *in = x->x + row * x->width, *weight = (const float *)matrix->weight + output * matrix->inputs;
    const int64_t width = x->width;
    for (int64_t k = 0; k < width; k++) {
        Vec w[TILE_VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < TILE_VECTORS; j++) w[j] = load(weight + k * PANEL + j * LANES);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            const Vec broadcast = splat(in[i * width + k]);
#pragma GCC unroll 4
            for (int j = 0; j < TILE_VECTORS; j++) sum[i][j] += broadcast * w[j];
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < TILE_VECTORS; j++) store_outputs(sum[i][j], matrix, output + j * LANES, into, row + i);
}

#if defined(__AVX512VNNI__)
int qkv_has_int8(void) { return 1; }

/* Inline assembly: the code that compilers generate for the intrinsic spills registers. */
INLINE void dot_product_accumulate(__m512i *sum, __m512i weights, __m512i inputs) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(weights), "v"(inputs));
}

INLINE void tile_int8(const int rows, const Input *x, int64_t row, const Matrix *matrix, int64_t output,
                      Destination into) {
    __m512i sum[TILE_ROWS][TILE_VECTORS];
    const int8_t *in = x->quantised + row * x->width;
    const uint8_t *weight = (const uint8_t *)matrix->weight + output * matrix->inputs;
    const int64_t width = x->width;
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < TILE_VECTORS; j++) sum[i][j] = _mm512_set1_epi32(x->offset[row + i]);
    for (int64_t k = 0; k < width; k += 4) {
        __m512i w[TILE_VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < TILE_VECTORS; j++) w[j] = _mm512_loadu_si512(weight + k * PANEL + j * 64);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            int32_t four_inputs;
            memcpy(&four_inputs, in + i * width + k, sizeof four_inputs);
            const __m512i broadcast = _mm512_set1_epi32(four_inputs);
#pragma GCC unroll 4
            for (int j = 0; j < TILE_VECTORS; j++) dot_product_accumulate(&sum[i][j], w[j], broadcast);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < TILE_VECTORS; j++) {
            Vec scales = load(matrix->scale + output + j * LANES) * x->scale[row + i];
            Vec dequantised = (Vec)_mm512_cvtepi32_ps(sum[i][j]) * scales;
            store_outputs(dequantised, matrix, output + j * LANES, into, row + i);
        }
}
#else
int qkv_has_int8(void) { return 0; }
#define tile_int8 tile_fp32 /* unused: Python offers int8 only with AVX-512 VNNI */
#endif

#define FOR_TILE_ROWS(tile)                                                                                            \
    switch (rows) {                                                                                                    \
    case 1: tile(1, x, row, matrix, output, into); break;                                                              \
    case 2: tile(2, x, row, matrix, output, into); break;                                                              \
    case 3: tile(3, x, row, matrix, output, into); break;                                                              \
    case 4: tile(4, x, row, matrix, output, into); break;                                                              \
    case 5: tile(TILE_ROWS > 4 ? 5 : 1, x, row, matrix, output, into); break;                                          \
    default: tile(TILE_ROWS, x, row, matrix, output, into);                                                            \
    }

static void multiply_tile_fp32(int64_t rows, const Input *x, int64_t row, const Matrix *matrix, int64_t output,
                               Destination into) {
    FOR_TILE_ROWS(tile_fp32)
}

static void multiply_tile_int8(int64_t rows, const Input *x, int64_t row, const Matrix *matrix, int64_t output,
                               Destination into) {
    FOR_TILE_ROWS(tile_int8)
}

typedef struct {
    const Input *x;
    const Matrix *matrix;
    Destination into;
} Product;

/* Thread task: multiply all input rows by the panels from `first_panel` to `end_panel`. */
static void multiply_panels(void *data, int64_t first_panel, int64_t end_panel, int thread) {
    (void)thread;
    const Input *x = ((Product *)data)->x;
    const Matrix *matrix = ((Product *)data)->matrix;
    const Destination into = ((Product *)data)->into;
    int64_t block_rows = L2_INPUT_BYTES / (x->width * (matrix->scale ? 1 : 4)) / TILE_ROWS * TILE_ROWS;
    if (block_rows < TILE_ROWS) block_rows = TILE_ROWS;
    for (int64_t first = 0; first < x->rows; first += block_rows) {
        int64_t end = first + block_rows < x->rows ? first + block_rows : x->rows;
        for (int64_t output = first_panel * PANEL; output < end_panel * PANEL; output += PANEL)
            for (int64_t row = first; row < end; row += TILE_ROWS) {
                int64_t rows = end - row < TILE_ROWS ? end - row : TILE_ROWS;
                if (matrix->scale)
                    multiply_tile_int8(rows, x, row, matrix, output, into);
                else
                    multiply_tile_fp32(rows, x, row, matrix, output, into);
            }
    }
}

void product(const Input *x, const Matrix *matrix, Destination into, int64_t threads) {
    Product job = {x, matrix, into};
    int64_t work = x->rows * x->width * matrix->outputs * (matrix->scale ? 1 : 4);
    in_parallel(work < MIN_PARALLEL_WORK ? 1 : threads, matrix->outputs / PANEL, multiply_panels, &job);
}

/* A single product for the self-test in Python: x (rows, inputs) to y (rows, outputs). */
void qkv_product(const Matrix *matrix, const float *x, int64_t rows, float *y, int64_t outputs, int relu,
                 void *memory) {
    Input in = quantise_input(matrix, x, rows, memory);
    product(&in, matrix, (Destination){y, outputs, outputs, relu, 0, NULL}, 1);
}
