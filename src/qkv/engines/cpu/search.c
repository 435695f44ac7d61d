/* Plain steps of a search: the next token of every row, or the best continuations of every beam, written into the
 * SearchState. Tested equal to GreedySearch.extend and BeamSearch.extend of qkv.core.search, ties included. */

#include "native.h"

#include <stdlib.h>

enum { CHUNK = 64 }; /* neighbours in the vocabulary, of which the largest is found first */

/* A continuation: log-probability of the whole, the row it continues, and the token. */
typedef struct {
    float total;
    int64_t parent, token;
} Next;

/* ---- one pass over the logits of a row ---- */

static float largest_of(const float *x, int64_t count) {
    Vec most = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) most = largest(load(x + i), most);
    float found = largest_lane(most);
    for (; i < count; i++) found = x[i] > found ? x[i] : found;
    return found;
}

/* log Σ exp of the row; of each chunk the largest that may follow. <pad> and <s> never may, nor </s> too early: they
 * become -inf, but are part of the sum. */
static float scan(const Search *s, float *logits, int early, float *chunks) {
    int64_t forbidden[3] = {s->pad, s->bos, s->eos};
    float taken[3];
    int some = early ? 3 : 2;
    for (int i = 0; i < some; i++) taken[i] = logits[forbidden[i]], logits[forbidden[i]] = -INFINITY;
    float most = -INFINITY;
    for (int64_t c = 0, first = 0; first < s->vocabulary; c++, first += CHUNK) {
        chunks[c] = largest_of(logits + first, s->vocabulary - first < CHUNK ? s->vocabulary - first : CHUNK);
        most = chunks[c] > most ? chunks[c] : most;
    }
    for (int i = 0; i < some; i++) most = taken[i] > most ? taken[i] : most;
    Vec sums[2] = {{0}};
    int64_t i = 0;
    for (; i + 2 * LANES <= s->vocabulary; i += 2 * LANES) {
        sums[0] += exponential(load(logits + i) - most);
        sums[1] += exponential(load(logits + i + LANES) - most);
    }
    float sum = sum_of_lanes(sums[0] + sums[1]);
    for (; i < s->vocabulary; i++) sum += expf(logits[i] - most);
    for (int j = 0; j < some; j++) sum += expf(taken[j] - most);
    return most + logf(sum);
}

/* The only token that may follow in a sentence, or -1. */
static int64_t only(const Search *s, int64_t sentence) {
    int64_t forced = s->forced[sentence * s->capacity + s->length[sentence]];
    return forced >= 0 ? forced : s->length[sentence] >= s->longest[sentence] ? s->eos : -1;
}

/* Whether anything points beyond what there is. */
static int is_wrong(const Search *s) {
    for (int64_t i = 0; i < s->sentences; i++)
        if (s->length[i] < 0 || s->length[i] >= s->capacity || s->longest[i] < 0 || s->longest[i] > s->capacity ||
            only(s, i) >= s->vocabulary)
            return 1;
    int64_t special[3] = {s->pad, s->bos, s->eos}, wrong = 0;
    for (int i = 0; i < 3; i++) wrong |= special[i] < 0 || special[i] >= s->vocabulary;
    return (int)wrong;
}

static int is_early(const Search *s, int64_t sentence) {
    int64_t least = s->longest[sentence] < s->shortest ? s->longest[sentence] : s->shortest;
    return s->length[sentence] < least;
}

/* ---- greedy ---- */

static int64_t likeliest(const Search *s, const float *logits, const float *chunks) {
    int64_t best = 0;
    for (int64_t c = 1; c * CHUNK < s->vocabulary; c++)
        if (chunks[c] > chunks[best]) best = c;
    int64_t token = best * CHUNK;
    for (int64_t i = token; i < s->vocabulary && i < (best + 1) * CHUNK; i++)
        if (logits[i] > logits[token]) token = i;
    return token;
}

static void write_row(const Search *s, int64_t sentence, int64_t row, int64_t token) {
    int64_t place = s->length[sentence] + 1 < s->capacity ? s->length[sentence] + 1 : s->capacity - 1;
    s->tokens[(sentence * s->rows + row) * s->capacity + place] = token;
    s->newest[sentence * s->rows + row] = token;
}

static void move_on(const Search *s, int64_t sentence) {
    if (s->length[sentence] + 1 < s->capacity) s->length[sentence]++;
}

int64_t qkv_extend_greedy(const Search *s) {
    if (is_wrong(s)) return 1;
    float *chunks = malloc(sizeof(float) * (size_t)(s->vocabulary / CHUNK + 1));
    if (!chunks) return 2;
    for (int64_t i = 0; i < s->sentences; i++) {
        float *logits = s->logits + i * s->vocabulary, *scores = s->finished_scores + i * 4;
        if (s->logprob[i] == -INFINITY) { /* it is over */
            s->done[i] = 1;
            move_on(s, i);
            continue;
        }
        float total = scan(s, logits, is_early(s, i), chunks);
        int64_t bound = only(s, i), token = bound >= 0 ? bound : likeliest(s, logits, chunks);
        int64_t length = s->length[i], limit = length >= s->longest[i];
        float now = s->logprob[i] + (logits[token] - total);
        int ends = token == s->eos;
        if (ends) {
            scores[0] = now / s->penalties[length], scores[1] = now, scores[2] = (float)length, scores[3] = (float)limit;
            memcpy(s->finished_tokens + i * s->capacity, s->tokens + i * s->capacity, sizeof(int64_t) * (size_t)s->capacity);
        }
        if (ends || limit) now = -INFINITY; /* what goes beyond its limit would never end */
        s->logprob[i] = now;
        s->done[i] = now == -INFINITY;
        write_row(s, i, 0, token);
        move_on(s, i);
    }
    free(chunks);
    return 0;
}

/* ---- beams ---- */

/* Put one among the best, behind its equals. */
static void rank(Next *best, int64_t wanted, Next one) {
    int64_t place = wanted - 1;
    if (!(one.total > best[place].total)) return;
    for (; place > 0 && one.total > best[place - 1].total; place--) best[place] = best[place - 1];
    best[place] = one;
}

static void rank_row(const Search *s, int64_t sentence, int64_t row, Next *best, float *chunks) {
    const int64_t wanted = 2 * s->rows, bound = only(s, sentence);
    float *logits = s->logits + (sentence * s->rows + row) * s->vocabulary;
    if (s->logprob[sentence * s->rows + row] == -INFINITY) return; /* it holds nothing */
    float shift = s->logprob[sentence * s->rows + row] - scan(s, logits, is_early(s, sentence), chunks);
    if (bound >= 0) {
        rank(best, wanted, (Next){logits[bound] + shift, row, bound});
        return;
    }
    for (int64_t c = 0; c * CHUNK < s->vocabulary; c++) {
        if (!(chunks[c] + shift > best[wanted - 1].total)) continue;
        for (int64_t i = c * CHUNK; i < s->vocabulary && i < (c + 1) * CHUNK; i++)
            rank(best, wanted, (Next){logits[i] + shift, row, i});
    }
}

/* Put a hypothesis that ends among the n best of its sentence, behind its equals. */
static void finish(const Search *s, int64_t sentence, Next one) {
    const int64_t length = s->length[sentence], limit = length >= s->longest[sentence], capacity = s->capacity;
    float score = one.total / s->penalties[length], *scores = s->finished_scores + sentence * s->n * 4;
    int64_t *finished = s->finished_tokens + sentence * s->n * capacity, place = s->n - 1;
    if (!(score > scores[place * 4])) return;
    for (; place > 0 && score > scores[(place - 1) * 4]; place--) {
        memcpy(scores + place * 4, scores + (place - 1) * 4, 4 * sizeof(float));
        memcpy(finished + place * capacity, finished + (place - 1) * capacity, sizeof(int64_t) * (size_t)capacity);
    }
    float fact[4] = {score, one.total, (float)length, (float)limit};
    memcpy(scores + place * 4, fact, sizeof fact);
    const int64_t *written = s->tokens + (sentence * s->rows + one.parent) * capacity;
    memcpy(finished + place * capacity, written, sizeof(int64_t) * (size_t)capacity);
}

/* Finish what ends and go on with what does not, of what is ranked; `tokens` is memory for the rows of a sentence. */
static void settle(const Search *s, int64_t sentence, const Next *best, Next *going, int64_t *tokens) {
    const int64_t rows = s->rows, capacity = s->capacity, length = s->length[sentence];
    const int limit = length >= s->longest[sentence];
    int64_t count = 0;
    for (int64_t i = 0; i < rows; i++)
        if (best[i].token == s->eos && best[i].total > -INFINITY) finish(s, sentence, best[i]);
    for (int64_t i = 0; i < 2 * rows && count < rows; i++)
        if (best[i].token != s->eos) going[count++] = best[i];
    for (int64_t i = 0; count < rows; i++)
        if (best[i].token == s->eos) going[count] = best[i], going[count++].total = -INFINITY;
    float most = -INFINITY;
    for (int64_t i = 0; i < rows; i++) most = going[i].total > most ? going[i].total : most;
    float worst = s->finished_scores[(sentence * s->n + s->n - 1) * 4];
    int done = s->done[sentence] || limit || most / s->penalties[s->longest[sentence]] <= worst;
    int64_t *own = s->tokens + sentence * rows * capacity;
    memcpy(tokens, own, sizeof(int64_t) * (size_t)(rows * capacity));
    for (int64_t i = 0; i < rows; i++) {
        memcpy(own + i * capacity, tokens + going[i].parent * capacity, sizeof(int64_t) * (size_t)(length + 1));
        write_row(s, sentence, i, going[i].token);
        s->logprob[sentence * rows + i] = done ? -INFINITY : going[i].total;
        s->chosen[sentence * rows + i] = sentence * rows + going[i].parent;
    }
    s->done[sentence] = (uint8_t)done;
    move_on(s, sentence);
}

int64_t qkv_extend_beams(const Search *s) {
    if (is_wrong(s)) return 1;
    float *chunks = malloc(sizeof(float) * (size_t)(s->vocabulary / CHUNK + 1));
    Next *best = malloc(sizeof(Next) * (size_t)(3 * s->rows));
    int64_t *tokens = malloc(sizeof(int64_t) * (size_t)(s->rows * s->capacity));
    if (!chunks || !best || !tokens) return free(chunks), free(best), free(tokens), 2;
    for (int64_t i = 0; i < s->sentences; i++) {
        for (int64_t j = 0; j < 2 * s->rows; j++) best[j] = (Next){-INFINITY, 0, s->pad};
        for (int64_t row = 0; row < s->rows; row++) rank_row(s, i, row, best, chunks);
        settle(s, i, best, best + 2 * s->rows, tokens);
    }
    return free(chunks), free(best), free(tokens), 0;
}

/* ---- step after step ---- */

static int64_t alive(const Search *s, int64_t *rows) {
    int64_t count = 0;
    for (int64_t row = 0; row < s->sentences * s->rows; row++)
        if (s->logprob[row] != -INFINITY) rows[count++] = row;
    return count;
}

static int64_t count_done(const Search *s) {
    int64_t count = 0;
    for (int64_t i = 0; i < s->sentences; i++) count += s->done[i];
    return count;
}

/* Let each row go on from the one that was chosen: its past is what the table says, `before` is memory for another. */
static void go_on(const Step *step, const Search *s, int32_t *before) {
    const size_t size = sizeof(int32_t) * (size_t)(s->sentences * s->rows * step->capacity);
    memcpy(before, step->origin, size);
    for (int64_t row = 0; row < s->sentences * s->rows; row++)
        if (s->chosen[row] != row)
            memcpy(step->origin + row * step->capacity, before + s->chosen[row] * step->capacity,
                   sizeof(int32_t) * (size_t)(step->length[row / s->rows] + 1));
}

/* Steps of model and search in turn: so many, or until so many sentences are done. How many; below 0: what failed. */
int64_t qkv_advance(const Model *model, Step *step, const Search *s, int64_t steps, int64_t done) {
    const int64_t rows = s->sentences * s->rows;
    int64_t *some = malloc(sizeof(int64_t) * (size_t)rows), made = 0;
    int32_t *before = malloc(sizeof(int32_t) * (size_t)(rows * step->capacity));
    int64_t failed = some && before ? 0 : 2;
    step->rows = some;
    while (!failed && made < steps && (!made || count_done(s) < done)) {
        step->count = alive(s, some);
        failed = qkv_step(model, step);
        if (!failed) failed = s->chosen ? qkv_extend_beams(s) : qkv_extend_greedy(s);
        if (s->chosen && !failed) go_on(step, s, before);
        for (int64_t i = 0; i < s->sentences; i++) step->length[i]++;
        made++;
    }
    free(some), free(before);
    return failed ? -failed : made;
}
