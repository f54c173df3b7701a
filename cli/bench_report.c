/* dspark bench: the measurements as a table, as JSON and as CSV. Measures nothing. */
#include <inttypes.h>
#include <string.h>

#include "bench.h"
#include "out.h"

static double share_of_roofline(const bench_cell *cell)
{
    return cell->p50 > 0 ? cell->roofline / cell->p50 : 0;
}

/* What was timed, of a format too. */
static const char *stage_name(int lane)
{
    return bench_stage_names[lane < BENCH_N_STAGES ? lane : DSPARK_PATH_ONEPASS];
}

static const char *temperature(const bench_cell *cell)
{
    return cell->cold ? "cold" : "hot";
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

static void print_limit(const char *name, const double probes[2], const char *unit)
{
    char before[32], after[32];
    printf("%s %s %s before, %s after\n", name, number(before, probes[0]), unit,
           number(after, probes[1]));
}

/* Every limit that a roofline below is made of. */
static void print_limits(const bench_result *r)
{
    char bytes[32], name[96];
    int s;
    print_limit("limits      compute", r->compute_gflops, "GFLOP/s");
    snprintf(name, sizeof name, "            read of %s (cold)",
             out_bytes(bytes, (double)r->buffer_bytes));
    print_limit(name, r->read_gbs, "GB/s");
    for (s = 0; s < BENCH_N_LANES; s++) {
        if (!(r->hot_gbs[s][0] > 0)) continue;
        snprintf(name, sizeof name, "            read of %s (hot %s)",
                 out_bytes(bytes, r->weight_bytes[s]), bench_lane_name(r, s));
        print_limit(name, r->hot_gbs[s], "GB/s");
    }
}

/* All models are open at a time. */
static void print_resident(const bench_result *r)
{
    char bytes[32];
    double sum = 0;
    size_t i;
    if (!r->n_formats) return;
    printf("models     ");
    for (i = 0; i < r->n_formats; i++) {
        sum += (double)r->resident_bytes[i];
        printf(" %s %s,", dspark_format_name(r->formats[i]),
               out_bytes(bytes, (double)r->resident_bytes[i]));
    }
    printf(" together %s in memory\n", out_bytes(bytes, sum));
}

static void print_machine(const bench_result *r)
{
    char text[32];
    printf("checkpoint  ");
    out_text(stdout, r->checkpoint);
    printf("%s, fingerprint %s\n", r->synthetic ? " (synthetic, context part)" : "",
           r->fingerprint);
    printf("            %u layers x %u outputs (with Q: %u), hidden %u, %u taps of %u\n",
           r->config->n_layers, r->config->kv_lora_rank + r->config->qk_rope_head_dim,
           r->config->kv_lora_rank + r->config->qk_rope_head_dim + r->config->q_lora_rank,
           r->config->hidden_size, r->config->n_taps, r->config->tap_width);
    printf("machine     ");
    out_text(stdout, r->cpu);
    printf(", %s, %u thread%s of %u processor%s, ", r->isa, r->n_threads,
           r->n_threads == 1 ? "" : "s", r->n_processors, r->n_processors == 1 ? "" : "s");
    if (r->cache_bytes)
        printf("last-level cache %s\n", out_bytes(text, (double)r->cache_bytes));
    else
        printf("last-level cache unknown\n");
    print_resident(r);
    print_limits(r);
    printf("conditions  load %.2f before, %.2f after; ", r->load[0], r->load[1]);
    if (r->steal_percent >= 0)
        printf("steal %.1f%%; ", r->steal_percent);
    else
        printf("steal unknown; ");
    printf("%s of measuring\n\n", out_seconds(text, r->seconds));
}

static void add_header(out_table *t, int formats)
{
    static const char *const format_names[] = {"positions", "format", "bytes", "repeats", "weights",
                                               "p50", "p99", "GB/s", "GFLOP/s", "roofline", "of it",
                                               "vs bf16", "of bytes"};
    static const char *const names[] = {"positions", "stage", "repeats", "weights", "p50", "p99",
                                        "us/position", "GB/s", "GFLOP/s", "roofline", "of it",
                                        "ratio"};
    size_t i;
    out_table_init(t, formats ? "rlrrlrrrrrrrr" : "rlrlrrrrrrrr");
    for (i = 0; i < sizeof names / sizeof *names; i++)
        out_table_cell(t, "%s", formats ? format_names[i] : names[i]);
    if (formats) out_table_cell(t, "%s", format_names[i]);
}

static void add_cell(out_table *t, const bench_result *r, uint64_t n_tokens, int lane,
                     const bench_cell *c)
{
    char text[32];
    out_table_cell(t, "%" PRIu64, n_tokens);
    out_table_cell(t, "%s", bench_lane_name(r, lane));
    if (r->n_formats) out_table_cell(t, "%s", out_bytes(text, r->weight_bytes[lane]));
    out_table_cell(t, "%" PRIu64, c->n_repeats);
    out_table_cell(t, "%s", temperature(c));
    out_table_cell(t, "%s", out_seconds(text, c->p50));
    out_table_cell(t, "%s", out_seconds(text, c->p99));
    if (!r->n_formats)
        out_table_cell(t, "%s", number(text, c->p50 / (double)n_tokens * 1e6));
    out_table_cell(t, "%s", number(text, c->bytes / c->p50 * 1e-9));
    out_table_cell(t, "%s", number(text, c->flops / c->p50 * 1e-9));
    out_table_cell(t, "%s", out_seconds(text, c->roofline));
    out_table_cell(t, "%.0f%%", 100 * share_of_roofline(c));
    if (c->ratio > 0)
        out_table_cell(t, "%.2fx", c->ratio);
    else
        out_table_cell(t, "-");
    if (r->n_formats && c->byte_share > 0)
        out_table_cell(t, "%.0f%%", 100 * c->byte_share);
    else if (r->n_formats)
        out_table_cell(t, "-");
}

int bench_print_text(const bench_result *r)
{
    bench_verdict verdict;
    out_table t;
    size_t i;
    int s;
    print_machine(r);
    add_header(&t, r->n_formats > 0);
    for (i = 0; i < r->n_rows; i++)
        for (s = 0; s < BENCH_N_LANES; s++)
            if (r->rows[i].cells[s].measured)
                add_cell(&t, r, r->rows[i].n_tokens, s, &r->rows[i].cells[s]);
    if (out_table_print(&t, 0) != 0) return out_error(EXIT_INTERNAL, "out of memory");
    if (r->n_formats)
        printf("\nThe one pass, states to cache. bytes: packed weights that it reads.\n"
               "vs bf16: the median of bf16 over that of the format; of bytes: that over the ratio\n"
               "of their weights' bytes. roofline, weights: see dspark bench --help.\n");
    else
        printf("\nratio: the median over that of onepass (taps->cache full: over taps->cache\n"
           "onepass). roofline: max(bytes / read, flops / compute), by the better of the probes\n"
           "before and after. weights: cold ones come from memory (the caches were emptied, or\n"
           "hold less) and stand against the cold read; hot ones against the read of as many\n"
           "bytes, again and again. Above 100%%: both probes met slower moments than the stage.\n");
    bench_judge(r, &verdict);
    if (verdict.n_reasons) printf("\nNOT RELIABLE: ");
    for (i = 0; i < verdict.n_reasons; i++)
        printf("%s%s", verdict.reasons[i], i + 1 < verdict.n_reasons ? "; " : "\n");
    return EXIT_OK;
}

static json_t *json_pair(const double pair[2])
{
    json_t *array = json_array();
    out_append(array, out_real(pair[0]));
    out_append(array, out_real(pair[1]));
    return array;
}

int bench_print_json(const bench_result *r)
{
    json_t *doc = json_object(), *rows = json_array(), *hot = json_object();
    json_t *reasons = json_array();
    bench_verdict verdict;
    size_t i;
    int s;
    out_set(doc, "checkpoint", out_string(r->checkpoint));
    out_set(doc, "synthetic", json_boolean(r->synthetic));
    out_set(doc, "fingerprint", json_string(r->fingerprint));
    out_set(doc, "cpu", out_string(r->cpu));
    out_set(doc, "isa", json_string(r->isa));
    out_set(doc, "threads", json_integer(r->n_threads));
    out_set(doc, "processors", json_integer(r->n_processors));
    out_set(doc, "last_level_cache_bytes",
            r->cache_bytes ? json_integer((json_int_t)r->cache_bytes) : json_null());
    out_set(doc, "compute_gflops", json_pair(r->compute_gflops));
    out_set(doc, "read_gbs", json_pair(r->read_gbs));
    for (s = 0; s < BENCH_N_LANES; s++)
        if (r->hot_gbs[s][0] > 0) out_set(hot, bench_lane_name(r, s), json_pair(r->hot_gbs[s]));
    out_set(doc, "hot_read_gbs", hot);
    out_set(doc, "buffer_bytes", json_integer((json_int_t)r->buffer_bytes));
    out_set(doc, "load", json_pair(r->load));
    out_set(doc, "steal_percent", r->steal_percent < 0 ? json_null() : out_real(r->steal_percent));
    out_set(doc, "seconds", out_real(r->seconds));
    bench_judge(r, &verdict);
    for (i = 0; i < verdict.n_reasons; i++) out_append(reasons, json_string(verdict.reasons[i]));
    out_set(doc, "reliable", json_boolean(verdict.n_reasons == 0));
    out_set(doc, "reasons", reasons);
    for (i = 0; i < r->n_rows; i++) {
        const bench_row *row = &r->rows[i];
        for (s = 0; s < BENCH_N_LANES; s++) {
            const bench_cell *c = &row->cells[s];
            json_t *item;
            if (!c->measured) continue;
            item = json_object();
            out_set(item, "tokens", json_integer((json_int_t)row->n_tokens));
            out_set(item, "stage", json_string(stage_name(s)));
            if (r->n_formats) {
                out_set(item, "format", json_string(bench_lane_name(r, s)));
                out_set(item, "weight_bytes", out_real(r->weight_bytes[s]));
                out_set(item, "resident_bytes",
                        json_integer((json_int_t)r->resident_bytes[s - BENCH_N_STAGES]));
            }
            out_set(item, "weights", json_string(temperature(c)));
            out_set(item, "repeats", json_integer((json_int_t)c->n_repeats));
            out_set(item, "best_seconds", out_real(c->best));
            out_set(item, "p50_seconds", out_real(c->p50));
            out_set(item, "p99_seconds", out_real(c->p99));
            out_set(item, "bytes", out_real(c->bytes));
            out_set(item, "flops", out_real(c->flops));
            out_set(item, "read_gbs", out_real(c->read_gbs));
            out_set(item, "roofline_seconds", out_real(c->roofline));
            out_set(item, "share_of_roofline", out_real(share_of_roofline(c)));
            if (c->byte_share > 0) out_set(item, "of_byte_ratio", out_real(c->byte_share));
            if (c->ratio > 0)
                out_set(item, r->n_formats ? "bf16_over_format" : "ratio_to_onepass",
                        out_real(c->ratio));
            out_append(rows, item);
        }
    }
    out_set(doc, "rows", rows);
    return out_json(doc);
}

int bench_write_csv(const bench_result *r, const char *path)
{
    out_file file;
    size_t i;
    int s, code = out_file_open(&file, path);
    if (code != EXIT_OK) return code;
    fprintf(file.stream, "tokens,stage,weights,repeats,best_s,p50_s,p99_s,bytes,flops,gb_per_s,"
            "gflop_per_s,read_probe_gb_per_s,compute_probe_gflop_per_s,roofline_s,"
            "share_of_roofline,%s\n", r->n_formats ? "bf16_over_format,format,weight_bytes"
                                                    : "ratio_to_onepass");
    for (i = 0; i < r->n_rows; i++) {
        const bench_row *row = &r->rows[i];
        for (s = 0; s < BENCH_N_LANES; s++) {
            const bench_cell *c = &row->cells[s];
            if (!c->measured) continue;
            fprintf(file.stream, "%" PRIu64 ",%s,%s,%" PRIu64 ",%.9g,%.9g,%.9g,%.0f,%.0f,%.6g,%.6g,"
                    "%.6g,%.6g,%.9g,%.6g,", row->n_tokens, stage_name(s),
                    temperature(c), c->n_repeats, c->best, c->p50, c->p99, c->bytes, c->flops,
                    c->bytes / c->p50 * 1e-9, c->flops / c->p50 * 1e-9, c->read_gbs,
                    bench_limit(r->compute_gflops), c->roofline, share_of_roofline(c));
            if (c->ratio > 0) fprintf(file.stream, "%.6g", c->ratio);
            if (r->n_formats)
                fprintf(file.stream, ",%s,%.0f", bench_lane_name(r, s), r->weight_bytes[s]);
            fputc('\n', file.stream);
        }
    }
    return out_file_commit(&file);
}
