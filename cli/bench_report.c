/* dspark bench: a report as tables, as JSON and as CSV, the same columns for everything that is measured.
 * Measures nothing. */
#include <inttypes.h>
#include <string.h>

#include "bench.h"
#include "out.h"

static const char *temperature(const bench_row *row)
{
    if (row->limit == BENCH_BY_SUM) return row->warm ? "hot" : "cold";
    return row->limit == BENCH_BY_READ ? "cold" : row->limit == BENCH_BY_HOT ? "hot" : "";
}

/* Three digits or more of a number that may be tiny: never a bare 0.0. */
static const char *number(char buf[32], double value)
{
    int decimals = value >= 100 ? 0 : value >= 10 ? 1 : value >= 1 ? 2 : 3;
    if (value < 0.1)
        snprintf(buf, 32, "%.2g", value);
    else
        snprintf(buf, 32, "%.*f", decimals, value);
    return buf;
}

static double gbs(const bench_row *row)
{
    return row->p50 > 0 ? row->bytes / row->p50 * 1e-9 : 0;
}

static double gflops(const bench_row *row)
{
    return row->p50 > 0 ? row->flops / row->p50 * 1e-9 : 0;
}

/* ---- text ---- */

static void print_limit(const char *name, const double probes[2], const char *unit)
{
    char before[32], after[32];
    printf("%s %s %s before, %s after\n", name, number(before, probes[0]), unit, number(after, probes[1]));
}

/* From the lowest row to the highest. */
static void print_watched(const bench_run *run)
{
    char from[32], to[32], best[32];
    double low = 1e30, high = 0;
    size_t i;
    for (i = 0; i < run->n_rows; i++) {
        if (!run->rows[i].watched) continue;
        if (run->rows[i].limit_gflops < low) low = run->rows[i].limit_gflops;
        if (run->rows[i].limit_gflops > high) high = run->rows[i].limit_gflops;
    }
    if (high > 0)
        printf("            compute beside the calls %s to %s GFLOP/s, best seen %s\n", number(from, low),
               number(to, high), number(best, run->best_gflops));
}

/* Every limit that a roofline below is made of. */
static void print_limits(const bench_report *r, const bench_run *run)
{
    char bytes[32], name[96];
    size_t i;
    print_limit("limits      compute", run->compute_gflops, "GFLOP/s");
    print_watched(run);
    snprintf(name, sizeof name, "            read of %s (cold)", out_bytes(bytes, (double)r->buffer_bytes));
    print_limit(name, run->read_gbs, "GB/s");
    for (i = 0; i < run->n_hot; i++) {
        snprintf(name, sizeof name, "            read of %s (hot %s)", out_bytes(bytes, run->hot[i].bytes),
                 run->hot[i].name);
        print_limit(name, run->hot[i].gbs, "GB/s");
    }
    if (run->copy_gbs[0] > 0) print_limit("            copy", run->copy_gbs, "GB/s");
    if (run->copy_gbs[0] > 0) print_limit("            copy to fresh memory", run->fresh_gbs, "GB/s");
}

static void print_machine(const bench_report *r)
{
    char text[32];
    printf("checkpoint  ");
    out_text(stdout, r->checkpoint);
    printf("%s, fingerprint %s\n", r->synthetic ? " (synthetic)" : "", r->fingerprint);
    printf("            %u layers x %u outputs (with Q: %u), hidden %u, %u taps of %u\n", r->config.n_layers,
           r->config.kv_lora_rank + r->config.qk_rope_head_dim,
           r->config.kv_lora_rank + r->config.qk_rope_head_dim + r->config.q_lora_rank, r->config.hidden_size,
           r->config.n_taps, r->config.tap_width);
    printf("machine     ");
    out_text(stdout, r->cpu);
    printf(", %u processor%s, last-level cache %s\n", r->n_processors, r->n_processors == 1 ? "" : "s",
           r->cache_bytes ? out_bytes(text, (double)r->cache_bytes) : "unknown");
}

static void print_run(const bench_report *r, const bench_run *run)
{
    char text[32];
    printf("\nrun         ");
    if (run->part) printf("over %s, ", run->part);
    if (run->format) printf("%s weights, ", run->format);
    printf("%s, %u thread%s of %u; ", dspark_isa_name(run->isa), run->n_threads, run->n_threads == 1 ? "" : "s",
           r->n_processors);
    printf("weights %s in memory", out_bytes(text, (double)run->resident_bytes));
    if (run->workspace_bytes) printf(", workspace %s", out_bytes(text, (double)run->workspace_bytes));
    printf("\n");
    if (run->w2_rows[0])
        printf("            Markov head: %.2f%% of W2's rows read, codes of %.2f%%\n",
               100.0 * (double)run->w2_rows[2] / (double)run->w2_rows[0],
               100.0 * (double)run->w2_rows[1] / (double)run->w2_rows[0]);
    print_limits(r, run);
    printf("conditions  load %.2f before, %.2f after; ", run->load[0], run->load[1]);
    if (run->steal_percent >= 0)
        printf("steal %.1f%%; ", run->steal_percent);
    else
        printf("steal unknown; ");
    printf("%s of measuring\n\n", out_seconds(text, run->seconds));
}

/* Columns that only some measurements have. */
typedef struct columns {
    int tokens, context, sequences, layers, format, cache, weights, bytes, outliers, disturbed, each, ratio;
    int byte_share, faults, peak;
    int whole_only; /* of blocks, not their stages */
    const char *ratio_name;
} columns;

static columns find_columns(const bench_report *r, const bench_run *run)
{
    columns c = {0};
    size_t i;
    for (i = 0; i < run->n_rows; i++) {
        const bench_row *row = &run->rows[i];
        c.tokens |= row->tokens > 0;
        c.context |= row->context > 0;
        c.sequences |= row->sequences > 1;
        c.format |= row->format && !run->format;
        c.cache |= row->cache && r->args->n_caches > 1;
        c.weights |= *temperature(row) != 0;
        c.outliers |= row->n_outliers > 0;
        c.disturbed |= row->n_disturbed + row->n_left > 0;
        c.ratio |= row->ratio > 0;
        c.byte_share |= row->byte_share > 0;
        c.faults |= row->n_faults > 0;
        c.peak |= row->peak_bytes > 0;
        if (row->ratio_key)
            c.ratio_name = strcmp(row->ratio_key, "bf16_over_format") == 0 ? "vs bf16"
                           : strcmp(row->ratio_key, "of_fresh_copy") == 0  ? "of fresh"
                                                                           : "ratio";
    }
    c.layers = run->part && strcmp(run->part, "layers") == 0;
    c.whole_only = c.layers || (run->part && strcmp(run->part, "sequences") == 0);
    c.bytes = r->args->what != BENCH_CONTEXT || r->args->n_formats > 0;
    c.each = r->args->what == BENCH_CONTEXT && !r->args->n_formats;
    return c;
}

static void add_header(out_table *t, const columns *c)
{
    static char align[32];
    const struct {
        int wanted;
        char align;
        const char *name;
    } all[] = {
        {c->tokens, 'r', "positions"}, {c->context, 'r', "context"}, {c->sequences, 'r', "sequences"},
        {c->layers, 'r', "layers"},    {1, 'l', "stage"},            {c->format, 'l', "format"},
        {c->cache, 'l', "cache"},      {c->bytes, 'r', "bytes"},     {1, 'r', "repeats"},
        {c->outliers, 'r', "outliers"}, {c->disturbed, 'r', "disturbed"}, {c->weights, 'l', "weights"},
        {1, 'r', "p50"},               {1, 'r', "p99"},              {c->each, 'r', "us/position"},
        {1, 'r', "GB/s"},              {1, 'r', "GFLOP/s"},          {1, 'r', "roofline"},
        {1, 'r', "of it"},             {c->ratio, 'r', c->ratio_name}, {c->byte_share, 'r', "of bytes"},
        {c->faults, 'r', "faults"},    {c->peak, 'r', "peak"}};
    size_t i, n = 0;
    for (i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].wanted) align[n++] = all[i].align;
    align[n] = 0;
    out_table_init(t, align);
    for (i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].wanted) out_table_cell(t, "%s", all[i].name);
}

static void add_number(out_table *t, double value)
{
    char text[32];
    out_table_cell(t, "%s", value > 0 ? number(text, value) : "-");
}

static void add_row(out_table *t, const columns *c, const bench_row *row)
{
    char text[32];
    if (c->tokens) out_table_cell(t, row->tokens ? "%" PRIu64 : "-", row->tokens);
    if (c->context) out_table_cell(t, "%" PRIu64, row->context);
    if (c->sequences) out_table_cell(t, row->sequences ? "%" PRIu64 : "-", row->sequences);
    if (c->layers) out_table_cell(t, "%" PRIu64, row->layers);
    out_table_cell(t, "%s", row->stage);
    if (c->format) out_table_cell(t, "%s", row->format ? row->format : "-");
    if (c->cache) out_table_cell(t, "%s", row->cache ? row->cache : "-");
    if (c->bytes) out_table_cell(t, "%s", row->bytes > 0 ? out_bytes(text, row->bytes) : "-");
    out_table_cell(t, "%" PRIu64, row->n_repeats);
    if (c->outliers) out_table_cell(t, "%" PRIu64, row->n_outliers);
    if (c->disturbed) out_table_cell(t, "%" PRIu64 "%s", row->n_disturbed, row->n_left ? "*" : "");
    if (c->weights) out_table_cell(t, "%s", *temperature(row) ? temperature(row) : "-");
    out_table_cell(t, "%s", out_seconds(text, row->p50));
    out_table_cell(t, "%s", out_seconds(text, row->p99));
    if (c->each) out_table_cell(t, "%s", number(text, row->p50 / (double)row->tokens * 1e6));
    add_number(t, gbs(row));
    add_number(t, gflops(row));
    out_table_cell(t, "%s", row->roofline > 0 ? out_seconds(text, row->roofline) : "-");
    if (row->roofline > 0) out_table_cell(t, "%.0f%%", 100 * bench_share(row));
    else out_table_cell(t, "-");
    if (c->ratio) {
        if (row->ratio > 0) out_table_cell(t, "%.2fx", row->ratio);
        else out_table_cell(t, "-");
    }
    if (c->byte_share) {
        if (row->byte_share > 0) out_table_cell(t, "%.0f%%", 100 * row->byte_share);
        else out_table_cell(t, "-");
    }
    if (c->faults) out_table_cell(t, row->n_faults ? "%" PRIu64 : "-", row->n_faults);
    if (c->peak) out_table_cell(t, "%s", row->peak_bytes ? out_bytes(text, (double)row->peak_bytes) : "-");
}

static int any_disturbed(const bench_report *r)
{
    size_t i, k;
    for (i = 0; i < r->n_runs; i++)
        for (k = 0; k < r->runs[i]->n_rows; k++)
            if (r->runs[i]->rows[k].n_disturbed + r->runs[i]->rows[k].n_left) return 1;
    return 0;
}

static void print_notes(const bench_report *r)
{
    if (r->args->n_formats && r->args->what == BENCH_CONTEXT)
        printf("\nThe one pass, states to cache. vs bf16: the median of bf16 over that of the format; of bytes:\n"
               "that over the ratio of their weights' bytes.\n");
    if (r->args->what == BENCH_CONTEXT && !r->args->n_formats)
        printf("\nratio: the median over that of onepass (taps->cache full: over taps->cache onepass).\n");
    if (r->args->what == BENCH_LOAD)
        printf("\npack: bytes of packed weights; its roofline is memcpy by as many threads to memory that was used\n"
               "before; of fresh: the same to memory that the system must bring, as an opening's. faults, peak: pages\n"
               "that the system had to bring in the first repeat, and the largest resident size.\n");
    else
        printf("\nroofline: max(bytes / read, flops / compute). weights: cold ones come from memory (the caches\n"
               "were emptied, or hold less) and stand against the reads that take turns with the repeats, or\n"
               "the read probes before and after; hot ones against reads of as many bytes again and again.\n"
               "compute: probes of the same threads right before and after each call.\n");
    if (any_disturbed(r))
        printf("disturbed: tries beside which the threads did under 85%% of the best arithmetic that so many have\n"
               "shown. They are taken again, at most as many as were asked for, and those that remain are left\n"
               "out; *: they are more than half, and so all are in.\n");
}

int bench_print_text(const bench_report *r)
{
    size_t i, k;
    print_machine(r);
    for (i = 0; i < r->n_runs; i++) {
        const bench_run *run = r->runs[i];
        const columns c = find_columns(r, run);
        bench_verdict verdict;
        out_table t;
        print_run(r, run);
        add_header(&t, &c);
        for (k = 0; k < run->n_rows; k++)
            if (!c.whole_only || run->rows[k].limit == BENCH_BY_SUM) add_row(&t, &c, &run->rows[k]);
        if (out_table_print(&t, 0) != 0) return out_error(EXIT_INTERNAL, "out of memory");
        bench_judge(r, run, &verdict);
        if (verdict.n_reasons) printf("\nNOT RELIABLE: ");
        for (k = 0; k < verdict.n_reasons; k++)
            printf("%s%s", verdict.reasons[k], k + 1 < verdict.n_reasons ? "; " : "\n");
    }
    print_notes(r);
    return EXIT_OK;
}

/* ---- JSON ---- */

static json_t *json_pair(const double pair[2])
{
    json_t *array = json_array();
    out_append(array, out_real(pair[0]));
    out_append(array, out_real(pair[1]));
    return array;
}

static json_t *json_count(uint64_t n)
{
    return json_integer((json_int_t)n);
}

static json_t *row_json(const bench_row *row)
{
    json_t *item = json_object();
    out_set(item, "stage", json_string(row->stage));
    if (row->tokens) out_set(item, "tokens", json_count(row->tokens));
    if (row->sequences) out_set(item, "context", json_count(row->context));
    if (row->sequences) out_set(item, "sequences", json_count(row->sequences));
    if (row->layers) out_set(item, "layers", json_count(row->layers));
    if (row->format) out_set(item, "format", json_string(row->format));
    if (row->cache) out_set(item, "cache", json_string(row->cache));
    if (row->weight_bytes > 0) out_set(item, "weight_bytes", out_real(row->weight_bytes));
    if (*temperature(row)) out_set(item, "weights", json_string(temperature(row)));
    out_set(item, "repeats", json_count(row->n_repeats));
    out_set(item, "outliers", json_count(row->n_outliers));
    out_set(item, "best_seconds", out_real(row->best));
    out_set(item, "p50_seconds", out_real(row->p50));
    out_set(item, "p99_seconds", out_real(row->p99));
    out_set(item, "bytes", out_real(row->bytes));
    out_set(item, "flops", out_real(row->flops));
    out_set(item, "gb_per_s", out_real(gbs(row)));
    out_set(item, "gflop_per_s", out_real(gflops(row)));
    out_set(item, "disturbed", json_count(row->n_disturbed));
    out_set(item, "disturbed_left", json_count(row->n_left));
    if (row->roofline > 0) {
        if (row->limit_gbs > 0) out_set(item, "limit_gbs", out_real(row->limit_gbs));
        if (row->limit_gbs > 0) out_set(item, "limit_gflops", out_real(row->limit_gflops));
        out_set(item, "roofline_seconds", out_real(row->roofline));
        out_set(item, "share_of_roofline", out_real(bench_share(row)));
    }
    if (row->byte_share > 0) out_set(item, "of_byte_ratio", out_real(row->byte_share));
    if (row->ratio > 0) out_set(item, row->ratio_key, out_real(row->ratio));
    if (row->n_faults) out_set(item, "faults", json_count(row->n_faults));
    if (row->peak_bytes) out_set(item, "peak_bytes", json_count(row->peak_bytes));
    return item;
}

static json_t *run_json(const bench_report *r, const bench_run *run)
{
    json_t *o = json_object(), *rows = json_array(), *hot = json_object(), *reasons = json_array();
    bench_verdict verdict;
    size_t i;
    if (run->part) out_set(o, "over", json_string(run->part));
    if (run->format) out_set(o, "format", json_string(run->format));
    out_set(o, "isa", json_string(dspark_isa_name(run->isa)));
    out_set(o, "threads", json_count(run->n_threads));
    out_set(o, "compute_gflops", json_pair(run->compute_gflops));
    out_set(o, "best_gflops", out_real(run->best_gflops));
    out_set(o, "read_gbs", json_pair(run->read_gbs));
    if (run->copy_gbs[0] > 0) out_set(o, "copy_gbs", json_pair(run->copy_gbs));
    if (run->copy_gbs[0] > 0) out_set(o, "fresh_copy_gbs", json_pair(run->fresh_gbs));
    for (i = 0; i < run->n_hot; i++) out_set(hot, run->hot[i].name, json_pair(run->hot[i].gbs));
    out_set(o, "hot_read_gbs", hot);
    out_set(o, "load", json_pair(run->load));
    out_set(o, "steal_percent", run->steal_percent < 0 ? json_null() : out_real(run->steal_percent));
    out_set(o, "seconds", out_real(run->seconds));
    out_set(o, "resident_bytes", json_count(run->resident_bytes));
    out_set(o, "workspace_bytes", json_count(run->workspace_bytes));
    if (run->w2_rows[0]) {
        out_set(o, "markov_rows", json_count(run->w2_rows[0]));
        out_set(o, "markov_rows_bounded", json_count(run->w2_rows[1]));
        out_set(o, "markov_rows_read", json_count(run->w2_rows[2]));
    }
    bench_judge(r, run, &verdict);
    for (i = 0; i < verdict.n_reasons; i++) out_append(reasons, json_string(verdict.reasons[i]));
    out_set(o, "reliable", json_boolean(verdict.n_reasons == 0));
    out_set(o, "reasons", reasons);
    for (i = 0; i < run->n_rows; i++) out_append(rows, row_json(&run->rows[i]));
    out_set(o, "rows", rows);
    return o;
}

int bench_print_json(const bench_report *r)
{
    json_t *doc = json_object(), *runs = json_array();
    size_t i;
    out_set(doc, "what", json_string(bench_what_names[r->args->what]));
    out_set(doc, "checkpoint", out_string(r->checkpoint));
    out_set(doc, "synthetic", json_boolean(r->synthetic));
    out_set(doc, "fingerprint", json_string(r->fingerprint));
    out_set(doc, "cpu", out_string(r->cpu));
    out_set(doc, "processors", json_count(r->n_processors));
    out_set(doc, "last_level_cache_bytes", r->cache_bytes ? json_count(r->cache_bytes) : json_null());
    out_set(doc, "buffer_bytes", json_count(r->buffer_bytes));
    for (i = 0; i < r->n_runs; i++) out_append(runs, run_json(r, r->runs[i]));
    out_set(doc, "runs", runs);
    return out_json(doc);
}

/* ---- CSV ---- */

static void put_count(FILE *f, uint64_t n)
{
    if (n) fprintf(f, "%" PRIu64, n);
    fputc(',', f);
}

static void put_real(FILE *f, double v)
{
    if (v > 0) fprintf(f, "%.9g", v);
    fputc(',', f);
}

static void put_csv_row(FILE *f, const bench_report *r, const bench_run *run, const bench_row *row, int reliable)
{
    const char *format = row->format ? row->format : run->format;
    fprintf(f, "%s,%s,\"%s\",%s,%s,%s,%u,", bench_what_names[r->args->what], run->part ? run->part : "", row->stage,
            format ? format : "", row->cache ? row->cache : "", dspark_isa_name(run->isa), run->n_threads);
    put_count(f, row->tokens);
    if (row->sequences) fprintf(f, "%" PRIu64, row->context);
    fputc(',', f);
    put_count(f, row->sequences);
    put_count(f, row->layers);
    fprintf(f, "%s,%" PRIu64 ",%" PRIu64 ",", temperature(row), row->n_repeats, row->n_outliers);
    fprintf(f, "%" PRIu64 ",%" PRIu64 ",", row->n_disturbed, row->n_left);
    fprintf(f, "%.9g,%.9g,%.9g,", row->best, row->p50, row->p99);
    put_real(f, row->bytes);
    put_real(f, row->weight_bytes);
    put_real(f, row->flops);
    put_real(f, gbs(row));
    put_real(f, gflops(row));
    put_real(f, row->roofline > 0 ? row->limit_gbs : 0);
    put_real(f, row->roofline > 0 && row->limit_gbs > 0 ? row->limit_gflops : 0);
    put_real(f, bench_limit(run->compute_gflops));
    put_real(f, row->roofline);
    put_real(f, bench_share(row));
    put_real(f, row->ratio);
    fprintf(f, "%s,", row->ratio > 0 ? row->ratio_key : "");
    put_real(f, row->byte_share);
    put_count(f, row->n_faults);
    put_count(f, row->peak_bytes);
    fprintf(f, "%s\n", reliable ? "yes" : "no");
}

int bench_write_csv(const bench_report *r, const char *path)
{
    out_file file;
    size_t i, k;
    int code = out_file_open(&file, path);
    if (code != EXIT_OK) return code;
    fputs("what,over,stage,format,cache,isa,threads,tokens,context,sequences,layers,weights,repeats,outliers,"
          "disturbed,disturbed_left,best_s,p50_s,p99_s,bytes,weight_bytes,flops,gb_per_s,gflop_per_s,limit_gb_per_s,"
          "limit_gflop_per_s,compute_probe_gflop_per_s,roofline_s,share_of_roofline,ratio,ratio_is,of_byte_ratio,"
          "faults,peak_bytes,reliable\n", file.stream);
    for (i = 0; i < r->n_runs; i++) {
        bench_verdict verdict;
        bench_judge(r, r->runs[i], &verdict);
        for (k = 0; k < r->runs[i]->n_rows; k++)
            put_csv_row(file.stream, r, r->runs[i], &r->runs[i]->rows[k], verdict.n_reasons == 0);
    }
    return out_file_commit(&file);
}
