/* dspark bench: what the system says about the machine and its load, and the verdict on a run: may
 * its figures be trusted? Measures nothing itself and prints nothing. */
#include <ctype.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"

/* A run is reliable when the machine was the same before and after, and its own. */
#define PROBE_DRIFT 1.25
#define SPARE_LOAD 0.5
#define MOST_STEAL 1.0

double bench_limit(const double probes[2])
{
    return probes[0] > probes[1] ? probes[0] : probes[1];
}

/* ---- the machine ---- */

void bench_read_cpu_name(char *name, size_t size)
{
    char line[512];
    FILE *f = fopen("/proc/cpuinfo", "r");
    snprintf(name, size, "unknown");
    while (f && fgets(line, sizeof line, f)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !colon) continue;
        colon += 1 + strspn(colon + 1, " ");
        colon[strcspn(colon, "\n")] = 0;
        snprintf(name, size, "%s", colon);
        break;
    }
    if (f) fclose(f);
}

static int read_cache_file(long cpu, int index, const char *name, char *text, int size)
{
    char path[128];
    int ok;
    FILE *f;
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%ld/cache/index%d/%s", cpu, index,
             name);
    f = fopen(path, "r");
    ok = f && fgets(text, size, f);
    if (f) fclose(f);
    return ok;
}

uint64_t bench_read_cache_bytes(void)
{
    char text[64], list[4096];
    uint64_t total = 0;
    int last = 0;
    long cpu;
    while (last < 9 && read_cache_file(0, last + 1, "size", text, sizeof text)) last++;
    for (cpu = 0; read_cache_file(cpu, last, "shared_cpu_list", list, sizeof list); cpu++) {
        char *unit;
        uint64_t n;
        /* Of the processors that share a cache the first one counts it. */
        if (!isdigit((unsigned char)list[0]) || strtol(list, NULL, 10) != cpu) continue;
        if (!read_cache_file(cpu, last, "size", text, sizeof text)) continue;
        n = strtoull(text, &unit, 10);
        if (n < UINT64_C(1) << 40) total += n << (*unit == 'K' ? 10 : *unit == 'M' ? 20 : 0);
    }
    return total;
}

int bench_read_steal(double *steal, double *total)
{
    double v[8];
    int i, n;
    FILE *f = fopen("/proc/stat", "r");
    if (!f) return 0;
    n = fscanf(f, "cpu %lf %lf %lf %lf %lf %lf %lf %lf", &v[0], &v[1], &v[2], &v[3], &v[4], &v[5],
               &v[6], &v[7]);
    fclose(f);
    if (n != 8) return 0;
    *steal = v[7];
    for (*total = 0, i = 0; i < 8; i++) *total += v[i];
    return 1;
}

double bench_read_load(void)
{
    double load;
    return getloadavg(&load, 1) == 1 ? load : -1;
}

uint32_t bench_read_processors(void)
{
    long n = sysconf(_SC_NPROCESSORS_ONLN); /* load counts over all of them, not only over ours */
    return n > 0 ? (uint32_t)n : 1;
}

uint32_t bench_read_available(void)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    return sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0 ? (uint32_t)CPU_COUNT(&set)
                                                                             : bench_read_processors();
}

uint64_t bench_read_peak(void)
{
    char line[256];
    unsigned long long kb = 0;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "VmHWM: %llu kB", &kb) == 1) break;
    if (f) fclose(f);
    return (uint64_t)kb << 10;
}

void bench_reset_peak(void)
{
    FILE *f = fopen("/proc/self/clear_refs", "w");
    if (!f) return;
    fputs("5\n", f);
    fclose(f);
}

/* ---- the verdict ---- */

static void add_reason(bench_verdict *v, const char *fmt, ...)
{
    va_list args;
    if (v->n_reasons >= BENCH_MAX_REASONS) return;
    va_start(args, fmt);
    vsnprintf(v->reasons[v->n_reasons++], sizeof *v->reasons, fmt, args);
    va_end(args);
}

/* "Cold" says that weights came from memory: that needs a buffer that fills every cache. */
static int buffer_is_small(const bench_report *r, const bench_run *run)
{
    size_t i;
    if (r->buffer_bytes >= r->cache_bytes) return 0;
    for (i = 0; i < run->n_rows; i++)
        if (run->rows[i].limit == BENCH_BY_READ) return 1;
    return 0;
}

static void judge_probe(bench_verdict *v, const char *name, const double probes[2],
                        const char *unit)
{
    double low = probes[0] < probes[1] ? probes[0] : probes[1], high = bench_limit(probes);
    if (!(high <= low * PROBE_DRIFT))
        add_reason(v, "%s %.3g %s before, %.3g after", name, probes[0], unit, probes[1]);
}

/* Does a row stand against the arithmetic before and after? Those with probes beside their calls do not. */
static int needs_compute(const bench_run *run)
{
    size_t i;
    for (i = 0; i < run->n_rows; i++) {
        const bench_row *row = &run->rows[i];
        if (row->flops > 0 && !row->watched && row->limit != BENCH_BY_NONE && row->limit != BENCH_BY_SUM) return 1;
    }
    return 0;
}

/* The row with the largest part of disturbed repeats in its median; of a block, whose stages share them, the whole. */
static void judge_disturbed(bench_verdict *v, const bench_run *run)
{
    const bench_row *worst = NULL;
    char at[48] = "";
    size_t i;
    for (i = 0; i < run->n_rows; i++) {
        const bench_row *row = &run->rows[i];
        if (row->n_left && (!worst || row->n_left * worst->n_repeats >= worst->n_left * row->n_repeats)) worst = row;
    }
    if (!worst) return;
    if (worst->tokens)
        snprintf(at, sizeof at, " at %llu position%s", (unsigned long long)worst->tokens,
                 worst->tokens == 1 ? "" : "s");
    add_reason(v, "%s in %llu of %llu repeats of %s%s (arithmetic under 85%% of the best)",
               run->n_threads > 1 ? "processors shared a core or were busy elsewhere" : "the processor was shared",
               (unsigned long long)worst->n_left, (unsigned long long)worst->n_repeats, worst->stage, at);
}

void bench_judge(const bench_report *r, const bench_run *run, bench_verdict *v)
{
    double load = run->load[0] > run->load[1] ? run->load[0] : run->load[1];
    char name[64];
    size_t i;
    memset(v, 0, sizeof *v);
    if (needs_compute(run)) judge_probe(v, "compute", run->compute_gflops, "GFLOP/s");
    judge_probe(v, "read", run->read_gbs, "GB/s");
    if (run->copy_gbs[0] > 0) judge_probe(v, "copy", run->copy_gbs, "GB/s");
    for (i = 0; i < run->n_hot; i++) {
        snprintf(name, sizeof name, "read of %s's size", run->hot[i].name);
        judge_probe(v, name, run->hot[i].gbs, "GB/s");
    }
    if (load > r->n_processors + SPARE_LOAD)
        add_reason(v, "load %.2f on %u processor%s", load, r->n_processors,
                   r->n_processors == 1 ? "" : "s");
    if (buffer_is_small(r, run))
        add_reason(v, "a buffer of %.4g MB does not empty caches of %.4g MB",
                   (double)r->buffer_bytes * 1e-6, (double)r->cache_bytes * 1e-6);
    judge_disturbed(v, run);
    if (run->steal_percent > MOST_STEAL) add_reason(v, "steal %.1f%%", run->steal_percent);
}
