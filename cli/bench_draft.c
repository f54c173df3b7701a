/* dspark bench --draft: one block over contexts of several lengths, time and bytes by stage. The context's
 * entries are made up (attention costs what it costs whatever they say); without a target the LM head and
 * embedding are made up too. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "bench.h"
#include "drafting.h"
#include "out.h"
#include "progress.h"

#define BLOCK_SIZE 64u
#define MAX_REPEATS 200

typedef struct draft_bench {
    const bench_draft_args *args;
    dspark_model *model;
    const dspark_config *config;
    dspark_drafter *drafter;
    dspark_cache *cache;
    uint16_t *head;            /* [vocab][h] when no target was given */
    int32_t *table;
    uint64_t longest;
    double read_gbs;
    unsigned char *buffer;     /* of the read probe */
} draft_bench;

#define PROBE_BYTES ((size_t)256 << 20)

static uint32_t next_bits(uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(*state >> 33);
}

/* bf16 numbers between -1 and 1, most of them small. */
static void fill_values(uint16_t *to, size_t n)
{
    uint64_t state = 1;
    size_t i;
    for (i = 0; i < n; i++) {
        uint32_t bits = next_bits(&state);
        to[i] = (uint16_t)((bits & 0x807f) | (0x3c00 + (bits >> 8 & 0x180)));
    }
}

static dspark_status open_all(draft_bench *b, dspark_error *err)
{
    const bench_draft_args *a = b->args;
    dspark_model_opts model;
    dspark_drafter_opts drafter;
    dspark_host_matrix head = {0};
    dspark_status st = DSPARK_OK;
    progress bar;
    dspark_model_opts_init(&model);
    model.parts = DSPARK_PART_BLOCK;
    model.target = a->target;
    model.n_threads = a->n_threads;
    model.progress = progress_update;
    model.progress_user = &bar;
    if (!a->target) { /* the sizes are in the config */
        dspark_model_opts first;
        dspark_model *probe = NULL;
        dspark_model_opts_init(&first);
        first.n_threads = a->n_threads;
        st = dspark_model_open(&probe, a->checkpoint, &first, err);
        if (st != DSPARK_OK) return st;
        head.rows = dspark_model_config(probe)->vocab_size;
        head.cols = dspark_model_config(probe)->hidden_size;
        dspark_model_close(probe);
        b->head = malloc((size_t)(head.rows * head.cols) * sizeof *b->head);
        if (!b->head) return out_set_error(err, DSPARK_ENOMEM, "", "out of memory for a made-up LM head");
        fill_values(b->head, (size_t)(head.rows * head.cols));
        head.data = b->head;
        model.lm_head = model.embed_tokens = &head;
    }
    progress_start(&bar, "packing", PROGRESS_BYTES);
    st = dspark_model_open(&b->model, a->checkpoint, &model, err);
    progress_end(&bar);
    if (st != DSPARK_OK) {
        out_add_path(err, a->checkpoint);
        return st;
    }
    b->config = dspark_model_config(b->model);
    dspark_drafter_opts_init(&drafter);
    drafter.n_threads = a->n_threads;
    drafter.isa = (dspark_isa)a->isa;
    return dspark_drafter_create(&b->drafter, b->model, &drafter, err);
}

static dspark_status make_context(draft_bench *b, dspark_error *err)
{
    uint64_t n_blocks = (b->longest + BLOCK_SIZE - 1) / BLOCK_SIZE, i;
    const size_t width = dspark_model_entry_width(b->model);
    dspark_status st;
    if (n_blocks == 0) n_blocks = 1;
    b->table = malloc((size_t)n_blocks * sizeof *b->table);
    b->buffer = calloc(PROBE_BYTES, 1);
    if (!b->table || !b->buffer) return out_set_error(err, DSPARK_ENOMEM, "", "out of memory");
    for (i = 0; i < n_blocks; i++) b->table[i] = (int32_t)i;
    memset(b->buffer, 1, PROBE_BYTES);
    st = dspark_cache_create(&b->cache, b->model, DSPARK_CACHE_BF16, BLOCK_SIZE, n_blocks, NULL, err);
    if (st != DSPARK_OK) return st;
    for (i = 0; i < b->config->n_layers; i++)
        fill_values(dspark_cache_get_view(b->cache)->layers[i], (size_t)n_blocks * BLOCK_SIZE * width);
    return DSPARK_OK;
}

/* ---- what a stage reads: weights as bf16, and the context's entries ---- */

static void count_bytes(const draft_bench *b, uint64_t n_context, double bytes[DRAFTING_STAGES])
{
    const dspark_config *c = b->config;
    const double h = c->hidden_size, l = 2.0 * c->n_layers, heads = c->n_heads, latent = c->kv_lora_rank;
    const double entry = latent + c->qk_rope_head_dim, vocab = c->vocab_size;
    const double all[DRAFTING_STAGES] = { /* in the order of drafting_stage_names */
        2 * h * c->block_size,
        l * (c->q_lora_rank + entry) * h,
        l * heads * (c->qk_nope_head_dim + c->qk_rope_head_dim) * c->q_lora_rank,
        l * heads * c->qk_nope_head_dim * latent,
        l * entry * (double)n_context,
        l * heads * c->v_head_dim * latent,
        l * heads * c->v_head_dim * h,
        l * 2 * c->intermediate_size * h,
        l * c->intermediate_size * h,
        0,
        2 * vocab * h,
        2 * vocab * c->markov_rank * c->block_size,
        0,
        2 * vocab * 2 * c->block_size,
    };
    memcpy(bytes, all, sizeof all);
}

static int compare_times(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Seconds of a stage, or of the whole block: DRAFTING_STAGES. */
static double median(dspark_draft_times *runs, size_t n, size_t stage)
{
    uint64_t times[MAX_REPEATS];
    size_t i;
    for (i = 0; i < n; i++)
        times[i] = stage < DRAFTING_STAGES ? *drafting_stage(&runs[i], stage) : runs[i].total;
    qsort(times, n, sizeof *times, compare_times);
    return (double)times[n / 2] * 1e-9;
}

static dspark_status run_context(draft_bench *b, uint64_t n_context, dspark_draft_times *runs, size_t n,
                                 dspark_error *err)
{
    int32_t tokens[1024];
    dspark_draft_input in;
    dspark_draft_output out;
    dspark_status st = DSPARK_OK;
    progress bar;
    size_t i;
    if (b->config->block_size > 1024)
        return out_set_error(err, DSPARK_EUNSUPPORTED, "block_size", "more than 1024");
    dspark_draft_input_init(&in);
    dspark_draft_output_init(&out);
    in.position = (int64_t)n_context;
    in.n_context = n_context;
    in.block_table = b->table;
    in.n_table = (size_t)((b->longest + BLOCK_SIZE - 1) / BLOCK_SIZE);
    out.tokens = tokens;
    progress_start(&bar, "drafting", PROGRESS_STEPS);
    for (i = 0; st == DSPARK_OK && i <= n; i++) { /* the first one warms up */
        st = dspark_draft(b->drafter, dspark_cache_get_view(b->cache), &in, &out, 1, err);
        if (st == DSPARK_OK && out.status != DSPARK_OK)
            st = out_set_error(err, out.status, "the block", "nothing could be drafted");
        if (i) runs[i - 1] = dspark_drafter_times(b->drafter);
        if (st == DSPARK_OK && progress_update(&bar, i, n)) st = out_check_interrupt(err);
    }
    progress_end(&bar);
    return st;
}

/* Medians and bytes of one context; the last element is the whole block. */
typedef struct measured {
    uint64_t n_context;
    double seconds[DRAFTING_STAGES + 1], bytes[DRAFTING_STAGES + 1];
} measured;

static void summarise(const draft_bench *b, uint64_t n_context, dspark_draft_times *runs, size_t n,
                      measured *m)
{
    size_t i;
    m->n_context = n_context;
    count_bytes(b, n_context, m->bytes);
    m->bytes[DRAFTING_STAGES] = 0;
    for (i = 0; i <= DRAFTING_STAGES; i++) m->seconds[i] = median(runs, n, i);
    for (i = 0; i < DRAFTING_STAGES; i++) m->bytes[DRAFTING_STAGES] += m->bytes[i];
}

static json_t *context_json(const measured *m)
{
    json_t *o = json_object(), *all = json_array();
    size_t i;
    for (i = 0; i < DRAFTING_STAGES; i++) {
        json_t *one = json_object();
        out_set(one, "stage", json_string(drafting_stage_names[i]));
        out_set(one, "seconds", out_real(m->seconds[i]));
        out_set(one, "bytes", out_real(m->bytes[i]));
        out_append(all, one);
    }
    out_set(o, "context", json_integer((json_int_t)m->n_context));
    out_set(o, "seconds", out_real(m->seconds[DRAFTING_STAGES]));
    out_set(o, "bytes", out_real(m->bytes[DRAFTING_STAGES]));
    out_set(o, "stages", all);
    return o;
}

static int print_context(const draft_bench *b, const measured *m)
{
    const double total = m->seconds[DRAFTING_STAGES], bytes = m->bytes[DRAFTING_STAGES];
    char text[32], size[32], more[32];
    out_table t;
    size_t i;
    printf("\ncontext %s: a block of %u in %s, %s read, %.2f of the read probe\n",
           out_count(text, m->n_context), b->config->block_size, out_seconds(size, total),
           out_bytes(more, bytes), bytes / total * 1e-9 / b->read_gbs);
    out_table_init(&t, "lrrrrr");
    out_table_cell(&t, "stage");
    out_table_cell(&t, "time");
    out_table_cell(&t, "share");
    out_table_cell(&t, "bytes");
    out_table_cell(&t, "GB/s");
    out_table_cell(&t, "of read probe");
    for (i = 0; i < DRAFTING_STAGES; i++) {
        double s = m->seconds[i], gbs = s > 0 ? m->bytes[i] / s * 1e-9 : 0;
        out_table_cell(&t, "%s", drafting_stage_names[i]);
        out_table_cell(&t, "%s", out_seconds(text, s));
        out_table_cell(&t, "%.1f %%", 100 * s / total);
        out_table_cell(&t, "%s", m->bytes[i] > 0 ? out_bytes(size, m->bytes[i]) : "");
        if (m->bytes[i] > 0) {
            out_table_cell(&t, "%.1f", gbs);
            out_table_cell(&t, "%.2f", gbs / b->read_gbs);
        } else {
            out_table_cell(&t, "%s", "");
            out_table_cell(&t, "%s", "");
        }
    }
    return out_table_print(&t, 2) == 0 ? EXIT_OK : out_error(EXIT_INTERNAL, "out of memory");
}

static int run_all(draft_bench *b, const uint64_t *contexts, size_t n)
{
    dspark_draft_times runs[MAX_REPEATS];
    measured m;
    json_t *doc = json_object(), *list = json_array();
    dspark_error err = {0};
    dspark_drafter_plan plan = dspark_drafter_get_plan(b->drafter);
    dspark_status st = dspark_probe_read(plan.n_threads, b->buffer, PROBE_BYTES, 0.5, &b->read_gbs, &err);
    char text[32], more[32], cpu[128];
    int code = st == DSPARK_OK ? EXIT_OK : out_fail(st, &err);
    size_t i, repeat = (size_t)b->args->repeat;
    bench_read_cpu_name(cpu, sizeof cpu);
    if (code == EXIT_OK && !b->args->json)
        printf("%s, %u thread%s, read probe %.1f GB/s; weights %s, workspace %s\n", cpu, plan.n_threads,
               plan.n_threads == 1 ? "" : "s", b->read_gbs,
               out_bytes(text, (double)dspark_model_resident_bytes(b->model)),
               out_bytes(more, (double)plan.workspace_bytes));
    for (i = 0; code == EXIT_OK && i < n; i++) {
        st = run_context(b, contexts[i], runs, repeat, &err);
        code = st == DSPARK_OK ? EXIT_OK : out_fail(st, &err);
        if (code != EXIT_OK) break;
        summarise(b, contexts[i], runs, repeat, &m);
        if (b->args->json) out_append(list, context_json(&m));
        else code = print_context(b, &m);
    }
    out_set(doc, "cpu", out_string(cpu));
    out_set(doc, "threads", json_integer(plan.n_threads));
    out_set(doc, "read_gbs", out_real(b->read_gbs));
    out_set(doc, "weight_bytes", json_integer((json_int_t)dspark_model_resident_bytes(b->model)));
    out_set(doc, "workspace_bytes", json_integer((json_int_t)plan.workspace_bytes));
    out_set(doc, "contexts", list);
    if (code == EXIT_OK && b->args->json) return out_json(doc);
    json_decref(doc);
    return code;
}

int bench_draft(const bench_draft_args *a)
{
    draft_bench b;
    dspark_error err = {0};
    uint64_t *contexts = NULL;
    long n = args_read_uints(a->contexts, &contexts), i;
    dspark_status st;
    int code;
    memset(&b, 0, sizeof b);
    b.args = a;
    if (n <= 0) return out_error(EXIT_USAGE, "--contexts: '%s' is no list of numbers", a->contexts);
    for (i = 0; i < n; i++)
        if (contexts[i] > b.longest) b.longest = contexts[i];
    st = open_all(&b, &err);
    if (st == DSPARK_OK && b.longest >= b.config->max_positions)
        st = out_set_error(&err, DSPARK_EINVAL, "--contexts", "%" PRIu64 " is not allowed; the model has "
                           "positions 0 to %" PRIu64, b.longest, b.config->max_positions - 1);
    if (st == DSPARK_OK) st = make_context(&b, &err);
    code = st == DSPARK_OK ? run_all(&b, contexts, (size_t)n) : out_fail(st, &err);
    dspark_drafter_free(b.drafter);
    dspark_cache_free(b.cache);
    dspark_model_close(b.model);
    free(b.head);
    free(b.table);
    free(b.buffer);
    free(contexts);
    return code;
}
