/* An engine that embeds the drafter. It owns everything: the paged cache with a block table for
 * each of two sequences, the threads, and the schedule. Steps are ragged: a sequence gets as many
 * rows as the target accepted, and the batch is padded to a fixed number of rows with slot -1.
 *
 * At the end the same rows are computed once more, one sequence alone, one row at a time, into
 * another cache with other blocks: the entries must be equal bit for bit.
 *   embed CKPT [ROWS] */
#include <dspark/dspark.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N_SEQUENCES 2
#define BLOCK_SIZE 16
#define STEP_ROWS 24   /* every call has this many rows; the rest of a step is padding */
#define N_THREADS 3
#define NULL_BLOCK 0   /* block 0 is never handed out, as in the engines that pad with it */

/* ---- the engine's threads ---- */

typedef struct work {
    void (*task)(void *arg, size_t i);
    void *arg;
    size_t n_tasks;
    atomic_size_t next;
} work;

static void *pull_tasks(void *user)
{
    work *w = user;
    size_t i;
    while ((i = atomic_fetch_add(&w->next, 1)) < w->n_tasks) w->task(w->arg, i);
    return NULL;
}

/* A real engine keeps its threads; starting some for each call shows the contract in fewer lines.
 * Tasks never wait for each other, so it does not matter how many threads could be had. */
static void run_parallel(void *user, void (*task)(void *arg, size_t i), void *arg, size_t n_tasks)
{
    pthread_t threads[N_THREADS - 1];
    size_t n_started = 0, i;
    work w = {task, arg, n_tasks, 0};
    (void)user;
    for (i = 0; i + 1 < n_tasks && i < N_THREADS - 1; i++)
        if (pthread_create(&threads[n_started], NULL, pull_tasks, &w) == 0) n_started++;
    pull_tasks(&w);
    for (i = 0; i < n_started; i++) pthread_join(threads[i], NULL);
}

/* ---- the engine's cache ---- */

typedef struct paged_cache {
    unsigned char *memory;    /* [n_layers][n_blocks][BLOCK_SIZE][entry_bytes] */
    void **layers;
    size_t layer_bytes;
    size_t entry_bytes;
    uint64_t n_blocks;
    int32_t next_block;
    int32_t *tables[N_SEQUENCES]; /* block numbers by position / BLOCK_SIZE */
    size_t n_table[N_SEQUENCES];
    dspark_cache_view view;
} paged_cache;

static void free_cache(paged_cache *c)
{
    int s;
    for (s = 0; s < N_SEQUENCES; s++) free(c->tables[s]);
    free(c->layers);
    free(c->memory);
}

static int make_cache(paged_cache *c, const dspark_config *config, size_t n_rows)
{
    size_t blocks_each = n_rows / BLOCK_SIZE + 1;
    uint32_t l;
    int s;
    memset(c, 0, sizeof *c);
    c->n_blocks = 1 + N_SEQUENCES * blocks_each; /* and the null block */
    c->next_block = NULL_BLOCK + 1;
    c->entry_bytes = dspark_cache_entry_bytes(DSPARK_CACHE_BF16, config->kv_lora_rank,
                                              config->qk_rope_head_dim);
    c->layer_bytes = (size_t)c->n_blocks * BLOCK_SIZE * c->entry_bytes;
    c->memory = calloc(config->n_layers, c->layer_bytes);
    c->layers = calloc(config->n_layers, sizeof *c->layers);
    if (!c->memory || !c->layers) return 0;
    for (l = 0; l < config->n_layers; l++) c->layers[l] = c->memory + l * c->layer_bytes;
    for (s = 0; s < N_SEQUENCES; s++)
        if (!(c->tables[s] = calloc(blocks_each, sizeof **c->tables))) return 0;
    dspark_cache_view_init(&c->view);
    c->view.n_layers = config->n_layers;
    c->view.layers = c->layers;
    c->view.n_blocks = c->n_blocks;
    c->view.block_size = BLOCK_SIZE;
    c->view.dtype = DSPARK_CACHE_BF16;
    return 1;
}

/* Hand out blocks until the sequence can hold `n_positions`: both take them in turn, so their
 * blocks interleave in memory. */
static void grow_table(paged_cache *c, int sequence, size_t n_positions)
{
    while (c->n_table[sequence] * BLOCK_SIZE < n_positions)
        c->tables[sequence][c->n_table[sequence]++] = c->next_block++;
}

static const unsigned char *find_entry(const paged_cache *c, uint32_t layer, int sequence,
                                       size_t position)
{
    size_t block = (size_t)c->tables[sequence][position / BLOCK_SIZE];
    return (const unsigned char *)c->layers[layer] +
           (block * BLOCK_SIZE + position % BLOCK_SIZE) * c->entry_bytes;
}

/* ---- the engine's schedule ---- */

typedef struct engine {
    dspark_model *model;
    const dspark_config *config;
    dspark_context *context;
    size_t row_bytes;             /* taps of one row */
    size_t n_rows;                /* of each sequence */
    unsigned char *taps[N_SEQUENCES];
    unsigned char *step_taps;     /* [STEP_ROWS][row_bytes] */
} engine;

/* Stands for the target model: numbers between -2 and 2 as bf16. */
static void make_taps(engine *e, int sequence)
{
    uint64_t state = 88172645463325252u + (uint64_t)sequence;
    size_t i;
    for (i = 0; i < e->n_rows * e->row_bytes; i += 2) {
        uint16_t value;
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        value = (uint16_t)((state >> 16 & 0x807f) | (0x7c + (state >> 40) % 4) << 7);
        memcpy(e->taps[sequence] + i, &value, sizeof value);
    }
}

/* One call with rows from both sequences. taken[s] rows from position at[s]; the rest is padding,
 * whose taps and positions are never read. */
static dspark_status run_step(engine *e, paged_cache *cache, const size_t at[N_SEQUENCES],
                              const size_t taken[N_SEQUENCES], size_t n_padded, dspark_error *err)
{
    int64_t positions[STEP_ROWS], slots[STEP_ROWS];
    size_t n = 0, i;
    int s;
    dspark_batch batch;
    dspark_run_info info;
    dspark_status st;
    for (s = 0; s < N_SEQUENCES; s++) {
        grow_table(cache, s, at[s] + taken[s]);
        for (i = 0; i < taken[s]; i++) positions[n + i] = (int64_t)(at[s] + i);
        st = dspark_slots_from_blocks(cache->tables[s], cache->n_table[s], BLOCK_SIZE, NULL_BLOCK,
                                      positions + n, taken[s], slots + n, err);
        if (st != DSPARK_OK) return st;
        memcpy(e->step_taps + n * e->row_bytes, e->taps[s] + at[s] * e->row_bytes,
               taken[s] * e->row_bytes);
        n += taken[s];
    }
    for (; n < n_padded; n++) {
        positions[n] = INT64_MIN;
        slots[n] = -1;
        memset(e->step_taps + n * e->row_bytes, 0xff, e->row_bytes); /* NaN, and nobody minds */
    }
    dspark_batch_init(&batch);
    batch.n_tokens = n;
    batch.taps = e->step_taps;
    batch.positions = positions;
    batch.slots = slots;
    return dspark_context_run(e->context, &batch, &cache->view, &info, err);
}

/* Both sequences together, 1 to 12 rows each a step, padded to STEP_ROWS. */
static dspark_status run_together(engine *e, paged_cache *cache, dspark_error *err)
{
    size_t at[N_SEQUENCES] = {0}, taken[N_SEQUENCES];
    dspark_status st;
    size_t step;
    int s;
    for (step = 0; at[0] < e->n_rows || at[1] < e->n_rows; step++) {
        for (s = 0; s < N_SEQUENCES; s++) {
            taken[s] = 1 + (step * 5 + (size_t)s * 3) % 12;
            if (taken[s] > e->n_rows - at[s]) taken[s] = e->n_rows - at[s];
        }
        st = run_step(e, cache, at, taken, STEP_ROWS, err);
        if (st != DSPARK_OK) return st;
        for (s = 0; s < N_SEQUENCES; s++) at[s] += taken[s];
    }
    return DSPARK_OK;
}

/* The last sequence first, then the other, one row a call, no padding. */
static dspark_status run_alone(engine *e, paged_cache *cache, dspark_error *err)
{
    dspark_status st;
    int s;
    for (s = N_SEQUENCES - 1; s >= 0; s--) {
        size_t at[N_SEQUENCES] = {0}, taken[N_SEQUENCES] = {0};
        taken[s] = 1;
        for (; at[s] < e->n_rows; at[s]++)
            if ((st = run_step(e, cache, at, taken, 1, err)) != DSPARK_OK) return st;
    }
    return DSPARK_OK;
}

static size_t count_different(const engine *e, const paged_cache *a, const paged_cache *b)
{
    size_t n = 0, i;
    uint32_t l;
    int s;
    for (l = 0; l < e->config->n_layers; l++)
        for (s = 0; s < N_SEQUENCES; s++)
            for (i = 0; i < e->n_rows; i++)
                n += memcmp(find_entry(a, l, s, i), find_entry(b, l, s, i), a->entry_bytes) != 0;
    return n;
}

/* Digest of one sequence's entries in order of layer and position, wherever its blocks lie. */
static int print_digest(const engine *e, const paged_cache *c, int sequence)
{
    size_t n = e->config->n_layers * e->n_rows, i;
    unsigned char *entries = malloc(n * c->entry_bytes);
    char hex[33];
    if (!entries) return 0;
    for (i = 0; i < n; i++)
        memcpy(entries + i * c->entry_bytes,
               find_entry(c, (uint32_t)(i / e->n_rows), sequence, i % e->n_rows), c->entry_bytes);
    dspark_digest(entries, n * c->entry_bytes, hex);
    printf("sequence %d: %zu positions, digest %s\n", sequence, e->n_rows, hex);
    free(entries);
    return 1;
}

static dspark_status fail_nomem(const char *what, dspark_error *err)
{
    *err = (dspark_error){.code = DSPARK_ENOMEM, .message = "out of memory"};
    snprintf(err->where, sizeof err->where, "%s", what);
    return DSPARK_ENOMEM;
}

static dspark_status open_engine(engine *e, const char *path, dspark_error *err)
{
    static const dspark_parallel threads = {NULL, run_parallel};
    dspark_context_opts opts;
    dspark_status st = dspark_model_open(&e->model, path, NULL, err);
    int s;
    if (st != DSPARK_OK) return st;
    e->config = dspark_model_config(e->model);
    e->row_bytes = (size_t)e->config->n_taps * e->config->tap_width * 2;
    dspark_context_opts_init(&opts);
    opts.n_threads = N_THREADS;
    opts.parallel = &threads;
    opts.max_tokens = STEP_ROWS;
    st = dspark_context_create(&e->context, e->model, &opts, err);
    if (st != DSPARK_OK) return st;
    e->step_taps = malloc(STEP_ROWS * e->row_bytes);
    for (s = 0; s < N_SEQUENCES; s++) {
        e->taps[s] = malloc(e->n_rows * e->row_bytes);
        if (e->taps[s]) make_taps(e, s);
    }
    if (e->step_taps && e->taps[0] && e->taps[1]) return DSPARK_OK;
    return fail_nomem("taps", err);
}

int main(int argc, char **argv)
{
    engine e = {0};
    paged_cache together = {0}, alone = {0};
    dspark_error err = {0};
    dspark_status st;
    size_t n_different = 0;
    int s, ok = 0;
    long n_rows = argc > 2 ? strtol(argv[2], NULL, 10) : 75;
    if (argc < 2 || n_rows < 1 || n_rows > 100000) {
        fprintf(stderr, "usage: embed CKPT [ROWS]\n");
        return 2;
    }
    e.n_rows = (size_t)n_rows;
    st = open_engine(&e, argv[1], &err);
    if (st == DSPARK_OK && (!make_cache(&together, e.config, e.n_rows) ||
                            !make_cache(&alone, e.config, e.n_rows)))
        st = fail_nomem("the engine's cache", &err);
    if (st == DSPARK_OK) st = run_together(&e, &together, &err);
    if (st == DSPARK_OK) st = run_alone(&e, &alone, &err);
    if (st == DSPARK_OK) {
        n_different = count_different(&e, &together, &alone);
        for (ok = 1, s = 0; s < N_SEQUENCES; s++) ok = print_digest(&e, &together, s) && ok;
        printf("together in padded batches against alone: %s\n",
               n_different ? "DIFFERENT" : "equal bit for bit");
    } else {
        fprintf(stderr, "%s: %s: %s\n", dspark_status_name(st), err.where, err.message);
    }
    free_cache(&together);
    free_cache(&alone);
    for (s = 0; s < N_SEQUENCES; s++) free(e.taps[s]);
    free(e.step_taps);
    dspark_context_free(e.context);
    dspark_model_close(e.model);
    return ok && !n_different ? 0 : 1;
}
