/* See bench_watch.h. */
#include "bench_watch.h"

#include <string.h>
#include <time.h>

#include "out.h"

/* A fifth of the call, so that both see the same mixture of good and bad moments; but long against being
 * called, and short against the time between two repeats. */
#define PART_OF_CALL 0.2
#define SHORTEST_PROBE 2e-4
#define LONGEST_PROBE 5e-3
#define LEAST_SHARE 0.85         /* of the best that was seen: two threads on one core do half */
#define PAUSE_NANOSECONDS 100000000L /* times the tries before: such episodes take tenths of a second */

int bench_is_disturbed(const bench_run *run, double gflops)
{
    return gflops < LEAST_SHARE * run->best_gflops;
}

void bench_allow_again(bench_report *r)
{
    r->again_row = r->args->repeat && r->args->repeat <= 3 ? 0 : 4;
}

void bench_watch_begin(bench_watch *w, bench_report *r, bench_run *run, size_t n_asked)
{
    w->report = r;
    w->run = run;
    w->blind = run->n_threads > bench_read_available();
    w->most_again = n_asked;
    w->n_again = w->n_disturbed = w->n = 0;
    w->call_seconds = 0;
}

static dspark_status look(bench_watch *w, const bench_call *call, double *gflops, dspark_error *err)
{
    double seconds = PART_OF_CALL * w->call_seconds;
    dspark_status st;
    if (w->blind) return DSPARK_OK;
    seconds = seconds < SHORTEST_PROBE ? SHORTEST_PROBE : seconds > LONGEST_PROBE ? LONGEST_PROBE : seconds;
    st = dspark_context_probe(call->threads, seconds, gflops, err);
    if (st == DSPARK_OK && *gflops > w->run->best_gflops) w->run->best_gflops = *gflops;
    return st;
}

/* One try. Not even called when the threads are not all there, unless that may not be tried again. */
static dspark_status try_once(bench_watch *w, const bench_call *call, int last, bench_sample *s, dspark_error *err)
{
    double started;
    dspark_status st;
    memset(s, 0, sizeof *s);
    st = call->prepare(call->user, &s->read_gbs, err);
    if (st == DSPARK_OK && !w->blind) st = dspark_context_probe(call->threads, 0, &s->gflops[0], err); /* wakes them */
    if (st == DSPARK_OK) st = look(w, call, &s->gflops[0], err);
    s->disturbed = !w->blind && st == DSPARK_OK && bench_is_disturbed(w->run, s->gflops[0]);
    if (st != DSPARK_OK || (s->disturbed && !last)) return st;
    started = out_clock();
    st = call->run(call->user, w->n, err);
    w->call_seconds = out_clock() - started;
    if (st == DSPARK_OK) st = look(w, call, &s->gflops[1], err);
    s->disturbed |= !w->blind && st == DSPARK_OK && bench_is_disturbed(w->run, s->gflops[1]);
    return st;
}

dspark_status bench_watch_repeat(bench_watch *w, const bench_call *call, dspark_error *err)
{
    struct timespec pause = {0, 0};
    bench_sample *s = &w->samples[w->n];
    bench_report *r = w->report;
    for (;;) {
        const double started = out_clock();
        const int last = w->n_again >= w->most_again || r->again <= 0 || r->again_row <= 0;
        dspark_status st = try_once(w, call, last, s, err);
        if (st != DSPARK_OK) return st;
        w->n_disturbed += (size_t)s->disturbed;
        if (!s->disturbed || last) break;
        w->n_again++;
        nanosleep(&pause, NULL);
        if (pause.tv_nsec < 4 * PAUSE_NANOSECONDS) pause.tv_nsec += PAUSE_NANOSECONDS;
        r->again -= out_clock() - started;
        r->again_row -= out_clock() - started;
    }
    w->n++;
    return DSPARK_OK;
}

static size_t count_disturbed(const bench_watch *w)
{
    size_t i, n = 0;
    for (i = 0; i < w->n; i++) n += (size_t)w->samples[i].disturbed;
    return n;
}

/* Are the disturbed ones too many to be left out? */
static int all_count(const bench_watch *w)
{
    return 2 * count_disturbed(w) > w->n;
}

size_t bench_watch_choose(const bench_watch *w, double *times)
{
    const int all = all_count(w);
    size_t i, n = 0;
    for (i = 0; i < w->n; i++)
        if (all || !w->samples[i].disturbed) times[n++] = times[i];
    return n;
}

void bench_watch_fill(const bench_watch *w, bench_row *row)
{
    const int all = all_count(w);
    double gflops[2 * BENCH_MAX_REPEATS];
    size_t i, n = 0;
    row->n_disturbed = w->n_disturbed;
    row->n_left = all ? count_disturbed(w) : 0;
    for (i = 0; i < w->n; i++) {
        if (!all && w->samples[i].disturbed) continue;
        gflops[n++] = w->samples[i].gflops[0];
        gflops[n++] = w->samples[i].gflops[1];
    }
    row->watched = !w->blind;
    row->limit_gflops = w->blind ? 0 : bench_median(gflops, n);
}

double bench_watch_reads(const bench_watch *w)
{
    double reads[BENCH_MAX_REPEATS];
    size_t i;
    for (i = 0; i < w->n; i++) reads[i] = w->samples[i].read_gbs;
    return bench_median(reads, w->n);
}
