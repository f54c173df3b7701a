/* dspark bench: which charts a report becomes. The drawing is bench_chart.c's. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "bench_chart.h"
#include "out.h"

#define MAX_PANELS 16
#define LIMIT "roofline of the same minutes"
#define HOLLOW "disturbed"

typedef struct plot {
    const bench_report *report;
    chart_panel *panels; /* [MAX_PANELS] */
    size_t n;
} plot;

static chart_panel *add_panel(plot *p, const char *title)
{
    chart_panel *panel;
    if (p->n == MAX_PANELS) return NULL;
    panel = &p->panels[p->n++];
    snprintf(panel->title, sizeof panel->title, "%s", title);
    panel->limit_name = LIMIT;
    panel->hollow_name = HOLLOW;
    return panel;
}

static void put_threads(char *to, size_t size, const char *before, const bench_run *run)
{
    snprintf(to, size, "%.40s%s%u thread%s", before, *before ? ", " : "", run->n_threads,
             run->n_threads == 1 ? "" : "s");
}

static int is_part(const bench_run *run, const char *part)
{
    return run->part && strcmp(run->part, part) == 0;
}

/* ---- context ---- */

static void draw_context(plot *p)
{
    const bench_report *r = p->report;
    const int formats = r->args->n_formats > 0;
    size_t i, k;
    for (i = 0; i < r->n_runs; i++) {
        const bench_run *run = r->runs[i];
        char title[128], text[64];
        chart_panel *time, *share;
        snprintf(text, sizeof text, "states to cache, %s", dspark_isa_name(run->isa));
        put_threads(title, sizeof title, text, run);
        if (!(time = add_panel(p, title))) return;
        snprintf(text, sizeof text, "share of the roofline, %s", dspark_isa_name(run->isa));
        put_threads(title, sizeof title, text, run);
        if (!(share = add_panel(p, title))) return;
        time->x_title = share->x_title = "positions in a call";
        time->y_title = "microseconds per position (p50)";
        share->y_title = "percent of the roofline";
        time->log_x = time->log_y = share->log_x = 1;
        share->rule = 100;
        for (k = 0; k < run->n_rows; k++) {
            const bench_row *row = &run->rows[k];
            const double n = (double)row->tokens;
            const char *name = formats ? row->format : row->stage;
            /* What begins at the taps is another way; its share can be compared, its time cannot. */
            const int from_taps = strncmp(row->stage, "taps", 4) == 0;
            const int first = k == 0 || strcmp(row->stage, run->rows[0].stage) == 0;
            if (!from_taps)
                chart_add_point(chart_find_series(time, name), n, row->p50 / n * 1e6,
                                first && !formats ? row->roofline / n * 1e6 : 0, row->n_left > 0);
            chart_add_point(chart_find_series(share, name), n, 100 * bench_share(row), 0, row->n_left > 0);
        }
    }
}

/* ---- stages ---- */

/* Bars of the rows first .. end-1: time, with the roofline as a mark. */
static void draw_stages(plot *p, const bench_run *run, size_t first, size_t end, const char *title)
{
    chart_panel *panel = add_panel(p, title);
    char note[48], time[32];
    size_t k;
    if (!panel) return;
    panel->x_title = "milliseconds (p50)";
    for (k = first; k < end; k++) {
        const bench_row *row = &run->rows[k];
        out_seconds(time, row->p50);
        if (row->roofline > 0)
            snprintf(note, sizeof note, "%.12s, %.0f%% of it%s", time, 100 * bench_share(row),
                     row->n_left ? ", disturbed" : "");
        else
            snprintf(note, sizeof note, "%s", time);
        chart_add_bar(panel, row->stage, note, row->p50 * 1e3, row->roofline * 1e3,
                      row->limit == BENCH_BY_SUM ? 2 : 0);
    }
}

static void stage_title(char *to, size_t size, const bench_run *run, const bench_row *row)
{
    char context[32] = "", sequences[48] = "";
    if (row->sequences) out_count(context, row->context);
    if (row->sequences > 1) snprintf(sequences, sizeof sequences, ", %" PRIu64 " sequences", row->sequences);
    snprintf(to, size, "%s%s%u thread%s%s%s%s%s%s", run->format ? run->format : "", run->format ? ", " : "",
             run->n_threads,
             run->n_threads == 1 ? "" : "s", *context ? ", context " : "", context, sequences,
             row->cache ? ", cache " : "",
             row->cache ? row->cache : "");
}

/* A panel for each block: rows of one context, number of sequences and cache, up to the row of the whole. */
static void draw_draft(plot *p)
{
    size_t i, k, first;
    char title[128];
    for (i = 0; i < p->report->n_runs; i++) {
        const bench_run *run = p->report->runs[i];
        for (first = k = 0; k < run->n_rows; k++) {
            if (run->rows[k].limit != BENCH_BY_SUM) continue;
            stage_title(title, sizeof title, run, &run->rows[k]);
            draw_stages(p, run, first, k + 1, title);
            first = k + 1;
        }
    }
}

/* Every row of a run; of linears the share of the roofline, as their times differ by a factor of a hundred. */
static void draw_runs(plot *p)
{
    const int linears = p->report->args->what == BENCH_LINEAR;
    size_t i, k;
    char title[128];
    for (i = 0; i < p->report->n_runs; i++) {
        const bench_run *run = p->report->runs[i];
        chart_panel *panel;
        if (!run->n_rows) continue;
        snprintf(title, sizeof title, "%s%s%s, %u thread%s", run->format ? run->format : "", run->format ? ", " : "",
                 dspark_isa_name(run->isa), run->n_threads, run->n_threads == 1 ? "" : "s");
        draw_stages(p, run, 0, run->n_rows, title);
        panel = &p->panels[p->n - 1];
        if (linears) panel->x_title = "percent of the roofline (p50)";
        for (k = 0; k < panel->n_bars; k++) { /* the same stage at several sizes */
            const bench_row *row = &run->rows[k];
            chart_bar *bar = &panel->bars[k];
            char time[32];
            if (row->tokens) snprintf(bar->name, sizeof bar->name, "%s, n = %" PRIu64, row->stage, row->tokens);
            if (!linears) continue;
            bar->value = 100 * bench_share(row);
            bar->limit = 100;
            snprintf(bar->note, sizeof bar->note, "%.0f%%, %.12s, %.3g GB/s%s", bar->value,
                     out_seconds(time, row->p50), row->bytes / row->p50 * 1e-9, row->n_left ? ", disturbed" : "");
        }
    }
}

/* ---- attention ---- */

static void draw_attention(plot *p, const char *part)
{
    const bench_report *r = p->report;
    chart_panel *time = add_panel(p, part ? "Attention over the context's length" : "Attention of one block"), *rate;
    size_t i, k;
    if (!time) return;
    time->x_title = "positions of context";
    time->y_title = "milliseconds per block (p50)";
    time->log_x = time->log_y = 1;
    rate = part ? NULL : add_panel(p, "Share of the roofline");
    if (rate) {
        rate->x_title = time->x_title;
        rate->y_title = "percent of the roofline";
        rate->log_x = 1;
        rate->rule = 100;
    }
    for (i = 0; i < r->n_runs; i++) {
        const bench_run *run = r->runs[i];
        if (part && !is_part(run, part)) continue;
        for (k = 0; k < run->n_rows; k++) {
            const bench_row *row = &run->rows[k];
            char name[64], text[64];
            snprintf(text, sizeof text, "%s%s%s", row->cache,
                     r->args->n_isas > 1 ? " " : "", r->args->n_isas > 1 ? dspark_isa_name(run->isa) : "");
            put_threads(name, sizeof name, text, run);
            if (!row->context) continue;
            chart_add_point(chart_find_series(time, name), (double)row->context, row->p50 * 1e3, row->roofline * 1e3,
                            row->n_left > 0);
            if (rate)
                chart_add_point(chart_find_series(rate, name), (double)row->context, 100 * bench_share(row), 0,
                                row->n_left > 0);
        }
    }
}

/* ---- growth ---- */

static void grow_tokens(plot *p)
{
    const bench_report *r = p->report;
    chart_panel *time = add_panel(p, "Positions in a call: states to cache");
    size_t i, k;
    if (!time) return;
    time->x_title = "positions in a call";
    time->y_title = "microseconds per position (p50)";
    time->log_x = time->log_y = 1;
    for (i = 0; i < r->n_runs; i++) {
        const bench_run *run = r->runs[i];
        char name[64];
        if (!is_part(run, "tokens")) continue;
        put_threads(name, sizeof name, "", run);
        for (k = 0; k < run->n_rows; k++) {
            const double n = (double)run->rows[k].tokens;
            chart_add_point(chart_find_series(time, name), n, run->rows[k].p50 / n * 1e6,
                            run->rows[k].roofline / n * 1e6, run->rows[k].n_left > 0);
        }
    }
}

/* Of the blocks of one part: x is `layers` or `sequences`. */
static void grow_blocks(plot *p, const char *part, const char *title, const char *x_title, int log_x)
{
    const bench_report *r = p->report;
    chart_panel *time = add_panel(p, title);
    size_t i, k;
    if (!time) return;
    time->x_title = x_title;
    time->y_title = "milliseconds per drafted token (p50)";
    time->log_x = log_x;
    for (i = 0; i < r->n_runs; i++) {
        const bench_run *run = r->runs[i];
        char name[64];
        if (!is_part(run, part)) continue;
        put_threads(name, sizeof name, "", run);
        for (k = 0; k < run->n_rows; k++) {
            const bench_row *row = &run->rows[k];
            const double tokens = (double)row->tokens;
            if (row->limit != BENCH_BY_SUM) continue;
            chart_add_point(chart_find_series(time, name), (double)(log_x ? row->sequences : row->layers),
                            row->p50 / tokens * 1e3, row->roofline / tokens * 1e3, row->n_left > 0);
        }
    }
}

/* Speed against the smallest number of threads; the dashed line is that number's speed times the threads. */
static void grow_threads(plot *p)
{
    const bench_report *r = p->report;
    const bench_run *base = NULL;
    chart_panel *speed;
    size_t i, k;
    for (i = 0; i < r->n_runs; i++)
        if (is_part(r->runs[i], "tokens") && (!base || r->runs[i]->n_threads < base->n_threads)) base = r->runs[i];
    if (!base || r->args->threads.n < 2 || !(speed = add_panel(p, "Threads: states to cache"))) return;
    speed->x_title = "threads";
    speed->y_title = "times the speed of the fewest";
    speed->limit_name = "proportional";
    for (i = 0; i < r->n_runs; i++) {
        const bench_run *run = r->runs[i];
        if (!is_part(run, "tokens")) continue;
        for (k = 0; k < run->n_rows && k < base->n_rows; k++) {
            const uint64_t n = run->rows[k].tokens;
            char name[64];
            if (k % 3 != 0 && k + 1 < run->n_rows) continue; /* some of the sizes */
            snprintf(name, sizeof name, "n = %" PRIu64, n);
            chart_add_point(chart_find_series(speed, name), run->n_threads, base->rows[k].p50 / run->rows[k].p50,
                            (double)run->n_threads / base->n_threads,
                            run->rows[k].n_left + base->rows[k].n_left > 0);
        }
    }
}

static void draw_growth(plot *p)
{
    grow_tokens(p);
    draw_attention(p, "contexts");
    grow_blocks(p, "layers", "Layers: a drafted block of a smaller model", "draft layers", 0);
    grow_blocks(p, "sequences", "Sequences in a batch, the same model", "sequences", 1);
    grow_threads(p);
}

/* ---- the file ---- */

int bench_write_svg(const bench_report *r, const char *path)
{
    static const char *const titles[] = {
        "Context KV: time and share of the machine's limits", "One drafted block by stage", "The draft's linears",
        "Attention over the latent cache", "From files to the first answer", "How time grows"};
    plot p = {r, calloc(MAX_PANELS, sizeof(chart_panel)), 0};
    double read = 0, compute = 0;
    char text[256];
    out_file file;
    size_t i;
    int code;
    if (!p.panels) return out_error(EXIT_INTERNAL, "out of memory");
    switch (r->args->what) {
    case BENCH_CONTEXT: draw_context(&p); break;
    case BENCH_DRAFT: draw_draft(&p); break;
    case BENCH_ATTENTION: draw_attention(&p, NULL); break;
    case BENCH_GROWTH: draw_growth(&p); break;
    default: draw_runs(&p); break;
    }
    for (i = 0; i < r->n_runs; i++) {
        if (bench_limit(r->runs[i]->read_gbs) > read) read = bench_limit(r->runs[i]->read_gbs);
        if (bench_limit(r->runs[i]->compute_gflops) > compute) compute = bench_limit(r->runs[i]->compute_gflops);
    }
    snprintf(text, sizeof text,
             "%.60s, %u processor%s; best probes: compute %.0f GFLOP/s, read %.1f GB/s; cold weights unless said",
             r->cpu, r->n_processors, r->n_processors == 1 ? "" : "s", compute, read);
    code = out_file_open(&file, path);
    if (code == EXIT_OK) {
        chart_write(file.stream, titles[r->args->what], text, p.panels, p.n);
        code = out_file_commit(&file);
    }
    free(p.panels);
    return code;
}
