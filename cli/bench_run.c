/* dspark bench: runs. Probes before and after, reads between the repeats, medians and rooflines. Knows
 * nothing about what is measured. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "bench.h"
#include "bench_watch.h"
#include "out.h"

#define HUGE_PAGE ((size_t)2 << 20)
#define SECONDS_A_ROW 4.0
#define SECONDS_AGAIN 30.0
#define MAX_THREADS 64 /* of the copy probe */

/* ---- reports ---- */

dspark_status bench_report_open(bench_report *r, const bench_args *a, dspark_error *err)
{
    size_t n = (size_t)(a->buffer + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    memset(r, 0, sizeof *r);
    r->args = a;
    r->buffer_bytes = a->buffer;
    r->again = SECONDS_AGAIN;
    r->n_processors = bench_read_processors();
    r->cache_bytes = bench_read_cache_bytes();
    bench_read_cpu_name(r->cpu, sizeof r->cpu);
    r->buffer = aligned_alloc(HUGE_PAGE, n);
    if (!r->buffer)
        return out_set_error(err, DSPARK_ENOMEM, "", "out of memory for a buffer of %zu bytes", n);
    /* In huge pages like the packed weights, so that the probe reads what a stage reads. */
    madvise(r->buffer, n, MADV_HUGEPAGE);
    memset(r->buffer, 1, n); /* real pages, not the shared zero page */
    return DSPARK_OK;
}

void bench_report_close(bench_report *r)
{
    size_t i;
    for (i = 0; i < r->n_runs; i++) {
        free(r->runs[i]->rows);
        free(r->runs[i]);
    }
    free(r->runs);
    free(r->buffer);
    bench_remove_directory(r);
}

void bench_describe(bench_report *r, const dspark_model *model)
{
    r->config = *dspark_model_config(model);
    if (r->fingerprint[0]) return; /* of several formats the first one's */
    r->checkpoint = r->args->checkpoint ? r->args->checkpoint
                    : r->args->preset   ? r->args->preset
                                        : "kimi-k3";
    snprintf(r->fingerprint, sizeof r->fingerprint, "%s", dspark_model_fingerprint(model));
}

size_t bench_n_runs(const bench_args *a)
{
    return a->threads.n * a->n_isas;
}

uint32_t bench_run_threads(const bench_args *a, size_t i)
{
    return (uint32_t)a->threads.items[i % a->threads.n];
}

dspark_isa bench_run_isa(const bench_args *a, size_t i)
{
    dspark_isa isa = (dspark_isa)a->isas[i / a->threads.n];
    return isa == DSPARK_ISA_AUTO ? dspark_isa_best() : isa;
}

uint32_t bench_most_threads(const bench_args *a)
{
    uint64_t most = 0;
    size_t i;
    for (i = 0; i < a->threads.n; i++) {
        if (a->threads.items[i] == 0) return 0;
        if (a->threads.items[i] > most) most = a->threads.items[i];
    }
    return (uint32_t)most;
}

/* ---- probes ---- */

/* Of one probe. Growth has many short runs; with up to three repeats it is a trial. */
static double probe_seconds(const bench_report *r)
{
    return r->args->repeat && r->args->repeat <= 3 ? 0.02 : r->part ? 0.1 : 0.4;
}

typedef struct copier {
    unsigned char *to;
    const unsigned char *from;
    size_t n_bytes;
    pthread_t thread;
    int started;
} copier;

static void *copy_bytes(void *arg)
{
    copier *c = arg;
    memcpy(c->to, c->from, c->n_bytes);
    return NULL;
}

/* Huge pages that nobody has touched; NULL without memory. base: what to unmap, HUGE_PAGE longer. */
static unsigned char *map_fresh(size_t n, void **base)
{
    unsigned char *at;
    *base = mmap(NULL, n + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*base == MAP_FAILED) return NULL;
    at = (unsigned char *)*base + (HUGE_PAGE - (uintptr_t)*base % HUGE_PAGE) % HUGE_PAGE;
    madvise(at, n, MADV_HUGEPAGE);
    return at;
}

dspark_status bench_probe_copy(const bench_report *r, uint32_t n_threads, double seconds, int fresh, double *gbs,
                               dspark_error *err)
{
    copier copiers[MAX_THREADS];
    const size_t n = n_threads < MAX_THREADS ? n_threads : MAX_THREADS;
    const size_t half = (size_t)r->buffer_bytes / 2, part = half / n / 64 * 64;
    double best = 1e30, started = out_clock(), t;
    size_t i, round;
    int failed = 0;
    for (round = 0; round < 3 || out_clock() - started < seconds; round++) {
        void *base = NULL;
        unsigned char *to = fresh ? map_fresh(half, &base) : r->buffer + half;
        if (!to) return out_set_error(err, DSPARK_ENOMEM, "", "no memory for the copy probe");
        t = out_clock();
        for (i = 0; i < n; i++) { /* starting a thread takes some 50 us of many ms */
            copiers[i] = (copier){.to = to + i * part, .from = r->buffer + i * part, .n_bytes = part};
            if (i) copiers[i].started = !pthread_create(&copiers[i].thread, NULL, copy_bytes, &copiers[i]);
            failed |= i && !copiers[i].started;
        }
        copy_bytes(&copiers[0]);
        for (i = 1; i < n; i++)
            if (copiers[i].started) pthread_join(copiers[i].thread, NULL);
        t = out_clock() - t;
        if (t < best) best = t;
        if (base) munmap(base, half + HUGE_PAGE);
        if (failed) return out_set_error(err, DSPARK_ENOMEM, "", "no thread for the copy probe");
    }
    *gbs = (double)(part * n) / (best > 1e-9 ? best : 1e-9) * 1e-9;
    return DSPARK_OK;
}

/* Both copies. */
static dspark_status probe_copies(const bench_report *r, bench_run *run, int after, dspark_error *err)
{
    dspark_status st = bench_probe_copy(r, run->n_threads, probe_seconds(r), 0, &run->copy_gbs[after], err);
    if (st != DSPARK_OK) return st;
    return bench_probe_copy(r, run->n_threads, probe_seconds(r), 1, &run->fresh_gbs[after], err);
}

/* The probe reads at least three times: a third of the buffer, unless that is not much more than the caches. */
dspark_status bench_evict(const bench_report *r, uint32_t n_threads, double *gbs, dspark_error *err)
{
    uint64_t n = r->buffer_bytes / 3;
    if (out_interrupted()) return out_check_interrupt(err);
    if (n < 4 * r->cache_bytes || n < 64) n = r->buffer_bytes;
    return dspark_probe_read(n_threads, r->buffer, (size_t)n, 1e-4, gbs, err);
}

static dspark_status probe_hot(const bench_report *r, bench_run *run, size_t i, int after,
                               dspark_error *err)
{
    double bytes = run->hot[i].bytes < 4096 ? 4096 : run->hot[i].bytes;
    if (out_interrupted()) return out_check_interrupt(err);
    return dspark_probe_read(run->n_threads, r->buffer, (size_t)bytes, probe_seconds(r) / 2,
                             &run->hot[i].gbs[after], err);
}

static dspark_status probe_machine(const bench_report *r, bench_run *run, int after, dspark_error *err)
{
    dspark_status st = out_check_interrupt(err);
    run->load[after] = bench_read_load();
    if (st == DSPARK_OK)
        st = dspark_probe_compute(run->isa, run->n_threads, probe_seconds(r),
                                  &run->compute_gflops[after], err);
    if (run->compute_gflops[after] > run->best_gflops) run->best_gflops = run->compute_gflops[after];
    if (st == DSPARK_OK) st = out_check_interrupt(err);
    if (st == DSPARK_OK)
        st = dspark_probe_read(run->n_threads, r->buffer, (size_t)r->buffer_bytes, probe_seconds(r),
                               &run->read_gbs[after], err);
    return st;
}

/* ---- runs ---- */

/* What as many threads did before, or each of more: a run that lies in one bad minute would not know. Not the
 * other way round: where more processors work they may be slower. */
static double find_best_gflops(const bench_report *r, const bench_run *run)
{
    double best = 0;
    size_t i;
    for (i = 0; i < r->n_runs; i++) {
        const bench_run *other = r->runs[i];
        const double each = other->best_gflops / other->n_threads;
        if (other->isa != run->isa || other->n_threads < run->n_threads) continue;
        if (each * run->n_threads > best) best = each * run->n_threads;
    }
    return best;
}

dspark_status bench_run_begin(bench_run **out, bench_report *r, dspark_isa isa, uint32_t n_threads,
                              int with_copy, dspark_error *err)
{
    bench_run *run = calloc(1, sizeof *run);
    dspark_status st;
    *out = NULL;
    if (run && r->n_runs == r->capacity) {
        size_t capacity = r->capacity ? 2 * r->capacity : 8;
        bench_run **more = realloc(r->runs, capacity * sizeof *more);
        if (more) {
            r->runs = more;
            r->capacity = capacity;
        } else {
            free(run);
            run = NULL;
        }
    }
    if (!run) return out_set_error(err, DSPARK_ENOMEM, "", "out of memory");
    r->runs[r->n_runs++] = run;
    run->part = r->part;
    run->isa = isa;
    run->n_threads = n_threads;
    run->best_gflops = find_best_gflops(r, run);
    run->started = out_clock();
    run->steal_percent = -1;
    if (!bench_read_steal(&run->ticks[0], &run->ticks[1])) run->ticks[1] = -1;
    st = probe_machine(r, run, 0, err);
    if (st == DSPARK_OK && with_copy) st = probe_copies(r, run, 0, err);
    *out = run;
    return st;
}

dspark_status bench_run_hot(bench_report *r, bench_run *run, const char *name, double bytes,
                            size_t *which, dspark_error *err)
{
    if (run->n_hot == BENCH_MAX_HOT)
        return out_set_error(err, DSPARK_EINTERNAL, "", "too many hot probes");
    *which = run->n_hot++;
    snprintf(run->hot[*which].name, sizeof run->hot[*which].name, "%s", name);
    run->hot[*which].bytes = bytes;
    return probe_hot(r, run, *which, 0, err);
}

bench_row *bench_run_add(bench_run *run, const char *stage)
{
    bench_row *row;
    if (run->n_rows == run->capacity) {
        size_t capacity = run->capacity ? 2 * run->capacity : 16;
        bench_row *more = realloc(run->rows, capacity * sizeof *more);
        if (!more) return NULL;
        run->rows = more;
        run->capacity = capacity;
    }
    row = &run->rows[run->n_rows++];
    memset(row, 0, sizeof *row);
    snprintf(row->stage, sizeof row->stage, "%s", stage);
    return row;
}

static void fill_roofline(const bench_run *run, bench_row *row)
{
    double by_compute, by_bytes;
    /* Repeats that were fine by what had been seen until then. */
    if (row->watched && bench_is_disturbed(run, row->limit_gflops)) row->n_left = row->n_repeats;
    if (row->n_disturbed < row->n_left) row->n_disturbed = row->n_left;
    if (!row->watched) row->limit_gflops = bench_limit(run->compute_gflops);
    if (row->limit == BENCH_BY_NONE || row->limit == BENCH_BY_SUM) return;
    if (row->limit == BENCH_BY_HOT)
        row->limit_gbs = bench_limit(run->hot[row->hot].gbs);
    else if (row->limit == BENCH_BY_COPY)
        row->limit_gbs = bench_limit(run->copy_gbs);
    else if (!(row->limit_gbs > 0)) /* no reads between the repeats: those before and after */
        row->limit_gbs = bench_limit(run->read_gbs);
    by_bytes = row->bytes / (row->limit_gbs * 1e9);
    by_compute = row->flops / (row->limit_gflops * 1e9);
    if (row->limit == BENCH_BY_COPY && row->p50 > 0) {
        row->ratio = row->bytes / (bench_limit(run->fresh_gbs) * 1e9) / row->p50;
        row->ratio_key = "of_fresh_copy";
    }
    row->roofline = by_bytes > by_compute ? by_bytes : by_compute;
}

dspark_status bench_run_end(bench_report *r, bench_run *run, dspark_error *err)
{
    double steal, total, sum = 0;
    dspark_status st = probe_machine(r, run, 1, err);
    size_t i;
    for (i = 0; st == DSPARK_OK && i < run->n_hot; i++) st = probe_hot(r, run, i, 1, err);
    if (st == DSPARK_OK && run->copy_gbs[0] > 0) st = probe_copies(r, run, 1, err);
    if (st != DSPARK_OK) return st;
    if (run->ticks[1] >= 0 && bench_read_steal(&steal, &total) && total > run->ticks[1])
        run->steal_percent = 100 * (steal - run->ticks[0]) / (total - run->ticks[1]);
    run->seconds = out_clock() - run->started;
    for (i = 0; i < run->n_rows; i++) {
        fill_roofline(run, &run->rows[i]);
        if (run->rows[i].limit == BENCH_BY_SUM) {
            run->rows[i].roofline = sum;
            run->rows[i].limit_gbs = 0;
            sum = 0;
        } else {
            sum += run->rows[i].roofline;
        }
    }
    return DSPARK_OK;
}

/* ---- numbers ---- */

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_median(double *values, size_t n)
{
    qsort(values, n, sizeof *values, compare_doubles);
    return n ? values[n / 2] : 0;
}

/* Nearest-rank percentile of sorted values. */
static double percentile(const double *sorted, size_t n, double p)
{
    size_t rank = (size_t)(p / 100 * (double)n + 0.9999999);
    if (rank < 1) rank = 1;
    return sorted[(rank < n ? rank : n) - 1];
}

void bench_row_times(bench_row *row, double *times, size_t n)
{
    qsort(times, n, sizeof *times, compare_doubles);
    row->n_repeats = n;
    row->best = times[0];
    row->p50 = percentile(times, n, 50);
    row->p99 = percentile(times, n, 99);
    for (row->n_outliers = 0; row->n_outliers < n; row->n_outliers++)
        if (times[n - 1 - row->n_outliers] <= 2 * row->p50) break;
}

/* Few long calls or many short ones. */
uint64_t bench_choose_repeats(const bench_args *a, double seconds_a_round)
{
    double n;
    if (a->repeat) return a->repeat;
    n = seconds_a_round > 0 ? SECONDS_A_ROW / seconds_a_round : 200;
    return n < 5 ? 5 : n > 200 ? 200 : (uint64_t)n;
}

double bench_share(const bench_row *row)
{
    return row->p50 > 0 ? row->roofline / row->p50 : 0;
}
