/* Plain search steps in C: select the next token of every row (greedy), or the best continuations of every beam, and
 * write them into the SearchState. Tested equal to GreedySearch.extend and BeamSearch.extend of qkv.core.search, ties
 * included. */

#include "native.h"

#include <stdlib.h>

enum { CHUNK = 64 }; /* vocabulary entries in a chunk; the maximum of each chunk is computed first */

/* Candidate continuation: log-probability of the hypothesis with this token, parent row, and token. */
typedef struct {
    float logprob;
    int64_t parent, token;
} Candidate;

/* ---- one pass over the logits of a row ---- */

static float max_of_chunk(const float *x, int64_t count) {
    Vec maximum = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) maximum = vec_max(load(x + i), maximum);
    float result = max_over_lanes(maximum);
    for (; i < count; i++) result = x[i] > result ? x[i] : result;
    return result;
}

/* Return log Σ exp of a row of logits, and write the maximum of each chunk. <pad>, <s> and, below the minimum length,
 * </s> are part of the sum; then their logits become -inf. */
static float scan(const SearchStep *s, float *logits, int below_min_length, float *chunks) {
    int64_t forbidden[3] = {s->pad, s->bos, s->eos};
    float forbidden_logits[3];
    int forbidden_count = below_min_length ? 3 : 2;
    for (int i = 0; i < forbidden_count; i++) {
        forbidden_logits[i] = logits[forbidden[i]];
        logits[forbidden[i]] = -INFINITY;
    }
    float maximum = -INFINITY;
    for (int64_t c = 0, first = 0; first < s->vocabulary; c++, first += CHUNK) {
        chunks[c] = max_of_chunk(logits + first, s->vocabulary - first < CHUNK ? s->vocabulary - first : CHUNK);
        maximum = chunks[c] > maximum ? chunks[c] : maximum;
    }
    for (int i = 0; i < forbidden_count; i++) maximum = forbidden_logits[i] > maximum ? forbidden_logits[i] : maximum;
    Vec sums[2] = {{0}};
    int64_t i = 0;
    for (; i + 2 * LANES <= s->vocabulary; i += 2 * LANES) {
        sums[0] += exponential(load(logits + i) - maximum);
        sums[1] += exponential(load(logits + i + LANES) - maximum);
    }
    float sum = sum_over_lanes(sums[0] + sums[1]);
    for (; i < s->vocabulary; i++) sum += expf(logits[i] - maximum);
    for (int j = 0; j < forbidden_count; j++) sum += expf(forbidden_logits[j] - maximum);
    return maximum + logf(sum);
}

/* Return the token that is forced at this position (prefix, or </s> at the length limit), or -1. */
static int64_t forced_token(const SearchStep *s, int64_t sentence) {
    int64_t forced = s->forced[sentence * s->capacity + s->length[sentence]];
    return forced >= 0 ? forced : s->length[sentence] >= s->longest[sentence] ? s->eos : -1;
}

/* Return whether a length or a token is out of range. */
static int is_invalid(const SearchStep *s) {
    for (int64_t i = 0; i < s->sentences; i++)
        if (s->length[i] < 0 || s->length[i] >= s->capacity || s->longest[i] < 0 || s->longest[i] > s->capacity ||
            forced_token(s, i) >= s->vocabulary)
            return 1;
    int64_t special[3] = {s->pad, s->bos, s->eos}, invalid = 0;
    for (int i = 0; i < 3; i++) invalid |= special[i] < 0 || special[i] >= s->vocabulary;
    return (int)invalid;
}

static int is_below_min_length(const SearchStep *s, int64_t sentence) {
    int64_t min_length = s->longest[sentence] < s->shortest ? s->longest[sentence] : s->shortest;
    return s->length[sentence] < min_length;
}

/* ---- greedy ---- */

static int64_t argmax(const SearchStep *s, const float *logits, const float *chunks) {
    int64_t best = 0;
    for (int64_t c = 1; c * CHUNK < s->vocabulary; c++)
        if (chunks[c] > chunks[best]) best = c;
    int64_t token = best * CHUNK;
    for (int64_t i = token; i < s->vocabulary && i < (best + 1) * CHUNK; i++)
        if (logits[i] > logits[token]) token = i;
    return token;
}

static void write_row(const SearchStep *s, int64_t sentence, int64_t row, int64_t token) {
    int64_t place = s->length[sentence] + 1 < s->capacity ? s->length[sentence] + 1 : s->capacity - 1;
    s->tokens[(sentence * s->rows + row) * s->capacity + place] = token;
    s->newest[sentence * s->rows + row] = token;
}

static void advance_length(const SearchStep *s, int64_t sentence) {
    if (s->length[sentence] + 1 < s->capacity) s->length[sentence]++;
}

int64_t qkv_extend_greedy(const SearchStep *s) {
    if (is_invalid(s)) return 1;
    float *chunks = malloc(sizeof(float) * (size_t)(s->vocabulary / CHUNK + 1));
    if (!chunks) return 2;
    for (int64_t i = 0; i < s->sentences; i++) {
        float *logits = s->logits + i * s->vocabulary, *scores = s->finished_scores + i * 4;
        if (s->logprob[i] == -INFINITY) { /* the sentence is done */
            s->done[i] = 1;
            advance_length(s, i);
            continue;
        }
        float total = scan(s, logits, is_below_min_length(s, i), chunks);
        int64_t forced = forced_token(s, i), token = forced >= 0 ? forced : argmax(s, logits, chunks);
        int64_t length = s->length[i], limit = length >= s->longest[i];
        float logprob = s->logprob[i] + (logits[token] - total);
        int is_eos = token == s->eos;
        if (is_eos) {
            scores[0] = logprob / s->penalties[length], scores[1] = logprob;
            scores[2] = (float)length, scores[3] = (float)limit;
            memcpy(s->finished_tokens + i * s->capacity, s->tokens + i * s->capacity,
                   sizeof(int64_t) * (size_t)s->capacity);
        }
        if (is_eos || limit) logprob = -INFINITY; /* NaN at the length limit would never end */
        s->logprob[i] = logprob;
        s->done[i] = logprob == -INFINITY;
        write_row(s, i, 0, token);
        advance_length(s, i);
    }
    free(chunks);
    return 0;
}

/* ---- beams ---- */

/* Insert a candidate into the sorted list of the best; it ranks after equal ones. */
static void insert_candidate(Candidate *best, int64_t count, Candidate candidate) {
    int64_t place = count - 1;
    if (!(candidate.logprob > best[place].logprob)) return;
    for (; place > 0 && candidate.logprob > best[place - 1].logprob; place--) best[place] = best[place - 1];
    best[place] = candidate;
}

static void insert_row_candidates(const SearchStep *s, int64_t sentence, int64_t row, Candidate *best, float *chunks) {
    const int64_t count = 2 * s->rows, forced = forced_token(s, sentence);
    float *logits = s->logits + (sentence * s->rows + row) * s->vocabulary;
    if (s->logprob[sentence * s->rows + row] == -INFINITY) return; /* the row has no hypothesis */
    float shift = s->logprob[sentence * s->rows + row] - scan(s, logits, is_below_min_length(s, sentence), chunks);
    if (forced >= 0) {
        insert_candidate(best, count, (Candidate){logits[forced] + shift, row, forced});
        return;
    }
    for (int64_t c = 0; c * CHUNK < s->vocabulary; c++) {
        if (!(chunks[c] + shift > best[count - 1].logprob)) continue;
        for (int64_t i = c * CHUNK; i < s->vocabulary && i < (c + 1) * CHUNK; i++)
            insert_candidate(best, count, (Candidate){logits[i] + shift, row, i});
    }
}

/* Insert a finished hypothesis into the n best of its sentence; it ranks after equal ones. */
static void insert_finished(const SearchStep *s, int64_t sentence, Candidate candidate) {
    const int64_t length = s->length[sentence], limit = length >= s->longest[sentence], capacity = s->capacity;
    float score = candidate.logprob / s->penalties[length], *scores = s->finished_scores + sentence * s->n * 4;
    int64_t *finished = s->finished_tokens + sentence * s->n * capacity, place = s->n - 1;
    if (!(score > scores[place * 4])) return;
    for (; place > 0 && score > scores[(place - 1) * 4]; place--) {
        memcpy(scores + place * 4, scores + (place - 1) * 4, 4 * sizeof(float));
        memcpy(finished + place * capacity, finished + (place - 1) * capacity, sizeof(int64_t) * (size_t)capacity);
    }
    float values[4] = {score, candidate.logprob, (float)length, (float)limit};
    memcpy(scores + place * 4, values, sizeof values);
    const int64_t *hypothesis = s->tokens + (sentence * s->rows + candidate.parent) * capacity;
    memcpy(finished + place * capacity, hypothesis, sizeof(int64_t) * (size_t)capacity);
}

/* Save finished candidates and continue the best unfinished ones; `tokens` is scratch memory for a sentence's rows. */
static void update_beams(const SearchStep *s, int64_t sentence, const Candidate *best, Candidate *continued,
                         int64_t *tokens) {
    const int64_t rows = s->rows, capacity = s->capacity, length = s->length[sentence];
    const int limit = length >= s->longest[sentence];
    int64_t count = 0;
    for (int64_t i = 0; i < rows; i++)
        if (best[i].token == s->eos && best[i].logprob > -INFINITY) insert_finished(s, sentence, best[i]);
    for (int64_t i = 0; i < 2 * rows && count < rows; i++)
        if (best[i].token != s->eos) continued[count++] = best[i];
    for (int64_t i = 0; count < rows; i++)
        if (best[i].token == s->eos) continued[count] = best[i], continued[count++].logprob = -INFINITY;
    float maximum = -INFINITY;
    for (int64_t i = 0; i < rows; i++) maximum = continued[i].logprob > maximum ? continued[i].logprob : maximum;
    float worst = s->finished_scores[(sentence * s->n + s->n - 1) * 4];
    int done = s->done[sentence] || limit || maximum / s->penalties[s->longest[sentence]] <= worst;
    int64_t *sentence_tokens = s->tokens + sentence * rows * capacity;
    memcpy(tokens, sentence_tokens, sizeof(int64_t) * (size_t)(rows * capacity));
    for (int64_t i = 0; i < rows; i++) {
        memcpy(sentence_tokens + i * capacity, tokens + continued[i].parent * capacity,
               sizeof(int64_t) * (size_t)(length + 1));
        write_row(s, sentence, i, continued[i].token);
        s->logprob[sentence * rows + i] = done ? -INFINITY : continued[i].logprob;
        s->parents[sentence * rows + i] = sentence * rows + continued[i].parent;
    }
    s->done[sentence] = (uint8_t)done;
    advance_length(s, sentence);
}

int64_t qkv_extend_beams(const SearchStep *s) {
    if (is_invalid(s)) return 1;
    float *chunks = malloc(sizeof(float) * (size_t)(s->vocabulary / CHUNK + 1));
    Candidate *best = malloc(sizeof(Candidate) * (size_t)(3 * s->rows));
    int64_t *tokens = malloc(sizeof(int64_t) * (size_t)(s->rows * s->capacity));
    if (!chunks || !best || !tokens) return free(chunks), free(best), free(tokens), 2;
    for (int64_t i = 0; i < s->sentences; i++) {
        for (int64_t j = 0; j < 2 * s->rows; j++) best[j] = (Candidate){-INFINITY, 0, s->pad};
        for (int64_t row = 0; row < s->rows; row++) insert_row_candidates(s, i, row, best, chunks);
        update_beams(s, i, best, best + 2 * s->rows, tokens);
    }
    return free(chunks), free(best), free(tokens), 0;
}

/* ---- step after step ---- */

static int64_t list_live_rows(const SearchStep *s, int64_t *rows) {
    int64_t count = 0;
    for (int64_t row = 0; row < s->sentences * s->rows; row++)
        if (s->logprob[row] != -INFINITY) rows[count++] = row;
    return count;
}

static int64_t count_done(const SearchStep *s) {
    int64_t count = 0;
    for (int64_t i = 0; i < s->sentences; i++) count += s->done[i];
    return count;
}

/* Copy the cache indirection table row of its parent to each row; `previous` is scratch memory. */
static void reorder_cache(const DecoderStep *step, const SearchStep *s, int32_t *previous) {
    const size_t size = sizeof(int32_t) * (size_t)(s->sentences * s->rows * step->capacity);
    memcpy(previous, step->origin, size);
    for (int64_t row = 0; row < s->sentences * s->rows; row++)
        if (s->parents[row] != row)
            memcpy(step->origin + row * step->capacity, previous + s->parents[row] * step->capacity,
                   sizeof(int32_t) * (size_t)(step->length[row / s->rows] + 1));
}

/* Alternate decoder and search steps until `steps` steps are done or `done` sentences have ended.
 * Return the number of steps, or the negative error code. */
int64_t qkv_advance(const Model *model, DecoderStep *step, const SearchStep *s, int64_t steps, int64_t done) {
    const int64_t rows = s->sentences * s->rows;
    int64_t *live_rows = malloc(sizeof(int64_t) * (size_t)rows), steps_done = 0;
    int32_t *previous = malloc(sizeof(int32_t) * (size_t)(rows * step->capacity));
    int64_t error = live_rows && previous ? 0 : 2;
    step->rows = live_rows;
    while (!error && steps_done < steps && (!steps_done || count_done(s) < done)) {
        step->row_count = list_live_rows(s, live_rows);
        error = qkv_step(model, step);
        if (!error) error = s->parents ? qkv_extend_beams(s) : qkv_extend_greedy(s);
        if (s->parents && !error) reorder_cache(step, s, previous);
        for (int64_t i = 0; i < s->sentences; i++) step->length[i]++;
        steps_done++;
    }
    free(live_rows), free(previous);
    return error ? -error : steps_done;
}
