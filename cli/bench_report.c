/* dspark bench: the measurements as a table, as JSON and as CSV. Measures nothing. */
#include <inttypes.h>
#include <string.h>

#include "bench.h"
#include "out.h"

static double share_of_roofline(const bench_cell *cell)
{
    return cell->p50 > 0 ? cell->roofline / cell->p50 : 0;
}

static const char *temperature(const bench_row *row, int stage)
{
    return row->cold && stage != BENCH_STATES ? "cold" : "hot";
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
    printf(", %s, %u threads\n", r->isa, r->n_threads);
    printf("limits      compute %.0f GFLOP/s before, %.0f after; read of %s %.1f GB/s before, %.1f "
           "after\n", r->compute_gflops[0], r->compute_gflops[1],
           out_bytes(text, (double)r->buffer_bytes), r->read_gbs[0], r->read_gbs[1]);
    printf("conditions  load %.2f before, %.2f after; ", r->load[0], r->load[1]);
    if (r->steal_percent >= 0)
        printf("steal %.1f%%; ", r->steal_percent);
    else
        printf("steal unknown; ");
    printf("%s of measuring\n\n", out_seconds(text, r->seconds));
}

int bench_print_text(const bench_result *r)
{
    char text[32];
    out_table t;
    size_t i;
    int s;
    print_machine(r);
    out_table_init(&t, "rlrlrrrrrrrr");
    out_table_cell(&t, "tokens");
    out_table_cell(&t, "stage");
    out_table_cell(&t, "repeats");
    out_table_cell(&t, "weights");
    out_table_cell(&t, "p50");
    out_table_cell(&t, "p99");
    out_table_cell(&t, "us/token");
    out_table_cell(&t, "GB/s");
    out_table_cell(&t, "GFLOP/s");
    out_table_cell(&t, "roofline");
    out_table_cell(&t, "of it");
    out_table_cell(&t, "ratio");
    for (i = 0; i < r->n_rows; i++) {
        const bench_row *row = &r->rows[i];
        for (s = 0; s < BENCH_N_STAGES; s++) {
            const bench_cell *c = &row->cells[s];
            if (!c->measured) continue;
            out_table_cell(&t, "%" PRIu64, row->n_tokens);
            out_table_cell(&t, "%s", bench_stage_names[s]);
            out_table_cell(&t, "%" PRIu64, c->n_repeats);
            out_table_cell(&t, "%s", temperature(row, s));
            out_table_cell(&t, "%s", out_seconds(text, c->p50));
            out_table_cell(&t, "%s", out_seconds(text, c->p99));
            out_table_cell(&t, "%.1f", c->p50 / (double)row->n_tokens * 1e6);
            out_table_cell(&t, "%.1f", c->bytes / c->p50 * 1e-9);
            out_table_cell(&t, "%.0f", c->flops / c->p50 * 1e-9);
            out_table_cell(&t, "%s", out_seconds(text, c->roofline));
            out_table_cell(&t, "%.0f%%", 100 * share_of_roofline(c));
            if (s == DSPARK_PATH_FULL && row->ratio > 0)
                out_table_cell(&t, "%.2fx", row->ratio);
            else
                out_table_cell(&t, "%s", "");
        }
    }
    if (out_table_print(&t, 0) != 0) return out_error(EXIT_INTERNAL, "out of memory");
    printf("\nratio: full / onepass, median over calls made in turn. roofline: max(bytes / read,\n"
           "flops / compute) with the better of the probes before and after; above 100%% means\n"
           "that both met slower moments than the stage.\n");
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
    json_t *doc = json_object(), *rows = json_array();
    size_t i;
    int s;
    out_set(doc, "checkpoint", out_string(r->checkpoint));
    out_set(doc, "synthetic", json_boolean(r->synthetic));
    out_set(doc, "fingerprint", json_string(r->fingerprint));
    out_set(doc, "cpu", out_string(r->cpu));
    out_set(doc, "isa", json_string(r->isa));
    out_set(doc, "threads", json_integer(r->n_threads));
    out_set(doc, "compute_gflops", json_pair(r->compute_gflops));
    out_set(doc, "read_gbs", json_pair(r->read_gbs));
    out_set(doc, "buffer_bytes", json_integer((json_int_t)r->buffer_bytes));
    out_set(doc, "load", json_pair(r->load));
    out_set(doc, "steal_percent", r->steal_percent < 0 ? json_null() : out_real(r->steal_percent));
    out_set(doc, "seconds", out_real(r->seconds));
    for (i = 0; i < r->n_rows; i++) {
        const bench_row *row = &r->rows[i];
        for (s = 0; s < BENCH_N_STAGES; s++) {
            const bench_cell *c = &row->cells[s];
            json_t *item;
            if (!c->measured) continue;
            item = json_object();
            out_set(item, "tokens", json_integer((json_int_t)row->n_tokens));
            out_set(item, "stage", json_string(bench_stage_names[s]));
            out_set(item, "weights", json_string(temperature(row, s)));
            out_set(item, "repeats", json_integer((json_int_t)c->n_repeats));
            out_set(item, "best_seconds", out_real(c->best));
            out_set(item, "p50_seconds", out_real(c->p50));
            out_set(item, "p99_seconds", out_real(c->p99));
            out_set(item, "bytes", out_real(c->bytes));
            out_set(item, "flops", out_real(c->flops));
            out_set(item, "read_gbs", out_real(c->read_gbs));
            out_set(item, "roofline_seconds", out_real(c->roofline));
            out_set(item, "share_of_roofline", out_real(share_of_roofline(c)));
            if (s == DSPARK_PATH_FULL && row->ratio > 0)
                out_set(item, "ratio_to_onepass", out_real(row->ratio));
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
            "share_of_roofline,ratio_to_onepass\n");
    for (i = 0; i < r->n_rows; i++) {
        const bench_row *row = &r->rows[i];
        for (s = 0; s < BENCH_N_STAGES; s++) {
            const bench_cell *c = &row->cells[s];
            if (!c->measured) continue;
            fprintf(file.stream, "%" PRIu64 ",%s,%s,%" PRIu64 ",%.9g,%.9g,%.9g,%.0f,%.0f,%.6g,%.6g,"
                    "%.6g,%.6g,%.9g,%.6g,", row->n_tokens, bench_stage_names[s],
                    temperature(row, s), c->n_repeats, c->best, c->p50, c->p99, c->bytes, c->flops,
                    c->bytes / c->p50 * 1e-9, c->flops / c->p50 * 1e-9, c->read_gbs,
                    bench_limit(r->compute_gflops), c->roofline, share_of_roofline(c));
            if (s == DSPARK_PATH_FULL && row->ratio > 0)
                fprintf(file.stream, "%.6g", row->ratio);
            fputc('\n', file.stream);
        }
    }
    return out_file_commit(&file);
}
