/* dspark.h: the DSpark draft model of Kimi-K3 in C. The only public header; read it top-down.
 *
 * A DSpark drafter guesses a block of tokens that a large target model then verifies in one pass.
 * Its MLA layers attend to the target's hidden states, so each newly processed position must first
 * become one latent KV entry in every layer:
 *
 *     taps [n, T*h] -> context_proj -> context_norm -> states [n, h]
 *     states -> one GEMM over all layers -> per layer RMSNorm(latent) | RoPE(rope key) -> paged cache
 *
 * Words (docs/design.md has the whole list):
 *   taps    hidden states of the chosen target layers, side by side, [n, T*h] bf16
 *   states  context_norm(context_proj(taps)), [n, h] bf16
 *   entry   latent | rope key: what one layer's cache holds for one position (576 wide for K3)
 *   slot    block * block_size + offset in a paged cache; negative = skip this row
 *   shard   one checkpoint module's rows inside a merged linear
 *
 * Conventions
 *   - Functions return a dspark_status: 0 or a negative code. Text goes to a caller-owned
 *     dspark_error, which may be NULL everywhere.
 *   - On failure every out-pointer is set to NULL and nothing is owned by the caller.
 *   - Close and free functions accept NULL.
 *   - Options structs begin with their size; call the matching *_init function, which fills the
 *     defaults. Zero means "default" in every field.
 *   - The library never prints, exits, aborts, reads the environment or installs handlers.
 *   - Thread-safety: a dspark_model and a dspark_checkpoint are immutable after opening and may be
 *     shared by any number of threads. A dspark_context serves one caller at a time.
 *   - Numbers: results are equal bit for bit (==) for every batch size, thread count, path and
 *     instruction set. docs/numerics.md is the contract.
 */
#ifndef DSPARK_DSPARK_H
#define DSPARK_DSPARK_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define DSPARK_API
#elif defined(DSPARK_BUILDING) || defined(__GNUC__)
#define DSPARK_API __attribute__((visibility("default")))
#else
#define DSPARK_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define DSPARK_VERSION_MAJOR 0
#define DSPARK_VERSION_MINOR 1
#define DSPARK_VERSION_PATCH 0
#define DSPARK_VERSION_STRING "0.1.0"

/* The version of the library that is linked, for example "0.1.0". Static storage. */
DSPARK_API const char *dspark_version(void);

/* ------------------------------------------------------------------------------------------------
 * Status and errors
 * --------------------------------------------------------------------------------------------- */

typedef enum dspark_status {
    DSPARK_OK = 0,
    DSPARK_EINVAL = -1,       /* an argument breaks the function's contract */
    DSPARK_ENOMEM = -2,       /* memory could not be had */
    DSPARK_EIO = -3,          /* the operating system refused to open or to read an input */
    DSPARK_EFORMAT = -4,      /* a file is broken: it is not what its format demands */
    DSPARK_EMODEL = -5,       /* files are well formed, but config and tensors disagree */
    DSPARK_EUNSUPPORTED = -6, /* understood, and not served by this library */
    DSPARK_ERANGE = -7,       /* a position, slot or block lies outside its range */
    DSPARK_ENOSPACE = -8,     /* a locked workspace is too small */
    DSPARK_ENONFINITE = -9,   /* NaN or infinity where a number must be */
    DSPARK_ECANCELLED = -10,  /* a progress callback asked to stop */
    DSPARK_EINTERNAL = -11,   /* a bug in this library */
    DSPARK_EOUTPUT = -12      /* an output cannot be made or written: no folder, no right, no room */
} dspark_status;

/* What went wrong and where. Caller-owned; strings are always terminated. */
typedef struct dspark_error {
    dspark_status code;
    char where[256];    /* file, tensor or field: "model.safetensors: layers.2.self_attn..." */
    char message[512];  /* one sentence: what was expected and what was found */
} dspark_error;

/* The name of a code, for example "DSPARK_EMODEL". Static storage, never NULL. */
DSPARK_API const char *dspark_status_name(dspark_status code);

/* ------------------------------------------------------------------------------------------------
 * Host hooks
 * --------------------------------------------------------------------------------------------- */

/* Memory. alloc returns `bytes` bytes aligned to `align` (a power of two, at most 4096) or NULL. */
typedef struct dspark_allocator {
    void *user;
    void *(*alloc)(void *user, size_t bytes, size_t align);
    void (*free)(void *user, void *ptr, size_t bytes);
} dspark_allocator;

/* Threads. run calls task(arg, i) once for every i in [0, n_tasks), on any threads, concurrently or
 * in turn, and returns when all calls have returned. Task bodies never block on each other. */
typedef struct dspark_parallel {
    void *user;
    void (*run)(void *user, void (*task)(void *arg, size_t i), void *arg, size_t n_tasks);
} dspark_parallel;

/* Progress of long work, called from the caller's thread. Non-zero cancels: DSPARK_ECANCELLED. */
typedef int (*dspark_progress)(void *user, uint64_t done, uint64_t total);

/* ------------------------------------------------------------------------------------------------
 * Instruction sets
 * --------------------------------------------------------------------------------------------- */

typedef enum dspark_isa {
    DSPARK_ISA_AUTO = 0,       /* the best one this machine has */
    DSPARK_ISA_REF = 1,        /* plain C, the specification of every other level */
    DSPARK_ISA_AVX2 = 2,       /* AVX2 + FMA + F16C */
    DSPARK_ISA_AVX512 = 3,     /* AVX-512 F, BW, DQ, VL */
    DSPARK_ISA_AVX512BF16 = 4  /* the same + AVX512_BF16 */
} dspark_isa;

/* 1 when this machine (CPU and operating system) can run `isa`, else 0. */
DSPARK_API int dspark_isa_available(dspark_isa isa);
/* "ref", "avx2", "avx512", "avx512bf16"; "auto" for DSPARK_ISA_AUTO. Static storage. */
DSPARK_API const char *dspark_isa_name(dspark_isa isa);
/* The level that DSPARK_ISA_AUTO stands for on this machine. */
DSPARK_API dspark_isa dspark_isa_best(void);

/* ------------------------------------------------------------------------------------------------
 * Tensor files (safetensors)
 * --------------------------------------------------------------------------------------------- */

typedef enum dspark_dtype {
    DSPARK_DTYPE_NONE = 0,
    DSPARK_BF16, DSPARK_F16, DSPARK_F32, DSPARK_F64,
    DSPARK_F8_E4M3, DSPARK_F8_E5M2, DSPARK_F8_E8M0, DSPARK_F8_E4M3FNUZ, DSPARK_F8_E5M2FNUZ,
    DSPARK_F4, DSPARK_F6_E2M3, DSPARK_F6_E3M2,
    DSPARK_BOOL, DSPARK_U8, DSPARK_I8, DSPARK_U16, DSPARK_I16, DSPARK_U32, DSPARK_I32,
    DSPARK_U64, DSPARK_I64, DSPARK_C64,
    DSPARK_DTYPE_COUNT
} dspark_dtype;

/* The safetensors spelling ("BF16", "F8_E4M3", ...). Static storage; "?" for an unknown value. */
DSPARK_API const char *dspark_dtype_name(dspark_dtype dtype);
/* Bits per element (4, 6, 8, 16, 32, 64); 0 for an unknown value. */
DSPARK_API unsigned dspark_dtype_bits(dspark_dtype dtype);

#define DSPARK_MAX_RANK 8

/* One tensor of an open file. `data` points into the mapping at ANY alignment: copy, never cast. */
typedef struct dspark_tensor {
    const char *name;
    dspark_dtype dtype;
    uint32_t rank;
    uint64_t shape[DSPARK_MAX_RANK];
    uint64_t n_elements;
    uint64_t n_bytes;
    const void *data;
    const char *file; /* base name of the file that holds it */
} dspark_tensor;

typedef struct dspark_checkpoint dspark_checkpoint;

/* Open a safetensors file, a directory with one, or a sharded directory with its index. Headers are
 * read and checked whole, tensor data is mapped and not touched. The files must not be truncated
 * while open. A directory's config.json is not read here. */
DSPARK_API dspark_status dspark_checkpoint_open(dspark_checkpoint **out, const char *path,
                                                dspark_error *err);
DSPARK_API void dspark_checkpoint_close(dspark_checkpoint *ckpt);

/* Tensors in file order (shard by shard, by offset). Valid until the checkpoint is closed. */
DSPARK_API size_t dspark_checkpoint_tensor_count(const dspark_checkpoint *ckpt);
DSPARK_API const dspark_tensor *dspark_checkpoint_tensor(const dspark_checkpoint *ckpt, size_t i);
/* NULL when there is none of that name. */
DSPARK_API const dspark_tensor *dspark_checkpoint_find(const dspark_checkpoint *ckpt,
                                                       const char *name);
/* Value of a __metadata__ key of the first file, or NULL. */
DSPARK_API const char *dspark_checkpoint_metadata(const dspark_checkpoint *ckpt, const char *key);

/* Tell the system that bytes [offset, offset + n_bytes) of a tensor have been used and need not stay
 * in memory; they are read again from the file when touched. Keeps a long pass over a mapped file at
 * a constant size. Advice: never fails. */
DSPARK_API void dspark_checkpoint_drop(const dspark_checkpoint *ckpt, const dspark_tensor *tensor,
                                       uint64_t offset, uint64_t n_bytes);

/* Writing. Declare every tensor, then give the data in order of declaration; nothing is visible
 * under `path` until dspark_writer_commit, which syncs and renames. Here and in every function that writes:
 * DSPARK_EOUTPUT when that is refused or the disk is full, DSPARK_EINVAL when something else lies at the
 * path; hidden files that killed processes left beside it are removed (docs/formats.md section 15). */
typedef struct dspark_writer dspark_writer;

DSPARK_API dspark_status dspark_writer_create(dspark_writer **out, const char *path,
                                              dspark_error *err);
/* Metadata and declarations come before the first dspark_writer_data. */
DSPARK_API dspark_status dspark_writer_metadata(dspark_writer *w, const char *key,
                                                const char *value, dspark_error *err);
DSPARK_API dspark_status dspark_writer_declare(dspark_writer *w, const char *name,
                                               dspark_dtype dtype, uint32_t rank,
                                               const uint64_t *shape, dspark_error *err);
/* The next `n_bytes` bytes of the data section; may be called many times per tensor. */
DSPARK_API dspark_status dspark_writer_data(dspark_writer *w, const void *data, size_t n_bytes,
                                            dspark_error *err);
/* All declared bytes must have been given. Frees the writer also on failure. */
DSPARK_API dspark_status dspark_writer_commit(dspark_writer *w, dspark_error *err);
/* Throw the unfinished file away. Accepts NULL. */
DSPARK_API void dspark_writer_abort(dspark_writer *w);

/* A file of any other kind, complete or not there. Calls for different paths may run at the same time. */
DSPARK_API dspark_status dspark_file_write(const char *path, const void *data, size_t n_bytes,
                                           dspark_error *err);

/* ------------------------------------------------------------------------------------------------
 * What a checkpoint is
 * --------------------------------------------------------------------------------------------- */

#define DSPARK_MAX_TAPS 64
#define DSPARK_MAX_LAYERS 256

typedef enum dspark_rope_type { DSPARK_ROPE_DEFAULT = 0, DSPARK_ROPE_YARN = 1 } dspark_rope_type;
typedef enum dspark_markov_type {
    DSPARK_MARKOV_NONE = 0, DSPARK_MARKOV_VANILLA, DSPARK_MARKOV_GATED, DSPARK_MARKOV_RNN
} dspark_markov_type;

/* config.json after all rules of docs/formats.md. Letters in brackets are the paper's. */
typedef struct dspark_config {
    uint32_t hidden_size;           /* [h] */
    uint32_t intermediate_size;     /* [F] */
    uint32_t n_layers;              /* [L] draft layers */
    uint32_t n_heads;               /* [H] */
    uint32_t q_lora_rank;           /* [Rq] */
    uint32_t kv_lora_rank;          /* [C] width of the latent */
    uint32_t qk_nope_head_dim;      /* [P] */
    uint32_t qk_rope_head_dim;      /* [R] width of the rope key */
    uint32_t v_head_dim;            /* [V] */
    uint32_t vocab_size;
    uint32_t n_taps;                /* [T] */
    uint32_t tap_width;             /* width of one tap (target_hidden_size) */
    uint32_t target_n_layers;       /* 0 when the config does not say */
    int32_t tap_layers[DSPARK_MAX_TAPS]; /* 0-based, ascending: the stream after that layer */
    uint32_t block_size;            /* [N] drafted tokens per block */
    uint32_t markov_rank;           /* [r] */
    dspark_markov_type markov_type;
    uint32_t mask_token_id;
    uint64_t max_positions;         /* positions are 0 .. max_positions-1 */
    int fc_norm;                    /* per-tap RMSNorm before context_proj */
    int causal;                     /* 1: causal inside the block */
    int confidence_head;
    int confidence_with_markov;
    float rms_norm_eps;
    float logit_scale;
    dspark_rope_type rope_type;
    double rope_theta;
    double rope_factor;             /* YaRN only, as are the following */
    double rope_beta_fast, rope_beta_slow;
    double rope_mscale, rope_mscale_all_dim;
    double rope_extrapolation_factor, rope_attn_factor;
    uint64_t rope_original_max_positions;
} dspark_config;

typedef enum dspark_verdict {
    DSPARK_USABLE = 0,       /* everything this library needs is there and right */
    DSPARK_RECOGNISED = 1,   /* known, and not usable here: see reason */
    DSPARK_BROKEN = 3        /* a file is broken, or tensors and config disagree */
} dspark_verdict;

typedef struct dspark_inspection dspark_inspection;

typedef struct dspark_inspect_opts {
    size_t struct_size;
    int deep;                 /* read all tensor data: non-finite values, zero rows, ranges */
    dspark_progress progress; /* bytes, when deep */
    void *progress_user;
} dspark_inspect_opts;
DSPARK_API void dspark_inspect_opts_init(dspark_inspect_opts *opts);

/* Look at a directory (or file) and say what it is and is not. Reads headers and config.json only,
 * unless deep. Succeeds also for foreign and broken checkpoints: the verdict is in the inspection.
 * Fails only for DSPARK_EINVAL, DSPARK_ENOMEM, DSPARK_ECANCELLED. */
DSPARK_API dspark_status dspark_inspect(dspark_inspection **out, const char *path,
                                        const dspark_inspect_opts *opts, dspark_error *err);
DSPARK_API void dspark_inspection_free(dspark_inspection *in);

DSPARK_API dspark_verdict dspark_inspection_verdict(const dspark_inspection *in);
/* A JSON document with everything that is known; docs/formats.md lists the keys. Owned by `in`. */
DSPARK_API const char *dspark_inspection_json(const dspark_inspection *in);

/* ------------------------------------------------------------------------------------------------
 * Model
 * --------------------------------------------------------------------------------------------- */

/* Parts of the weights that are packed at opening. Only what is asked for becomes resident. */
#define DSPARK_PART_CONTEXT 1u /* fc_norm, context_proj, context_norm, kv_a of every layer */
#define DSPARK_PART_Q_A 2u     /* q_a of every layer: DSPARK_PATH_FULL and the block need it */
#define DSPARK_PART_BLOCK 4u   /* the block forward and its heads; brings the two above with it */

typedef struct dspark_model dspark_model;

/* A BF16 matrix that the host holds, row-major, at any alignment. It must outlive the model. */
typedef struct dspark_host_matrix {
    const void *data;
    uint64_t rows, cols;
    size_t row_stride;          /* bytes; 0 = dense */
} dspark_host_matrix;

/* A drafter borrows two tensors of its target: the embedding and the LM head. Each is taken from the
 * first of: the draft's own files, the host (embed_tokens, lm_head), the target's checkpoint. A
 * target's tensors may lie in any of its files and its lm_head may be quantised; only these two are
 * read. With a target given, its config.json must agree with the draft's about vocabulary, hidden size
 * and depth (DSPARK_EMODEL names the key and both values). */
typedef struct dspark_model_opts {
    size_t struct_size;
    uint32_t parts;             /* 0 = DSPARK_PART_CONTEXT */
    uint32_t n_threads;         /* for packing; 0 = all */
    const dspark_allocator *allocator;
    dspark_progress progress;   /* bytes packed */
    void *progress_user;
    int vllm_compat;            /* merge quantised shards as vLLM does (inexact, for comparing) */
    const char *target;         /* a directory, for DSPARK_PART_BLOCK; may be NULL */
    const dspark_host_matrix *embed_tokens; /* [vocab, h]; looked up in place, never copied */
    const dspark_host_matrix *lm_head;      /* [vocab, h]; packed (copied) */
    const char *prepacked;      /* a file of dspark_prepack: mapped instead of packing; or NULL */
    int prepacked_verify;       /* hash all of it and all that it was made of, whatever files say */
} dspark_model_opts;
DSPARK_API void dspark_model_opts_init(dspark_model_opts *opts);

/* Open a checkpoint directory: config, exact roster, packing of the parts asked for.
 *
 * With opts->prepacked nothing is packed: that file is mapped, and all processes that map it share its
 * memory. It is believed while the checkpoint's files are untouched since it was made; otherwise
 * (copied or rewritten files, an LM head of the host) what the parts were made of is read and hashed.
 * DSPARK_EMODEL when it was made of other contents, another config or fewer parts, DSPARK_EFORMAT when
 * it is damaged, DSPARK_EUNSUPPORTED when another version or machine made it. Neither the checkpoint
 * nor that file may be cut short while open. vllm_compat does not go with it (DSPARK_EINVAL). */
DSPARK_API dspark_status dspark_model_open(dspark_model **out, const char *path,
                                           const dspark_model_opts *opts, dspark_error *err);
/* Pack a checkpoint into the file `out`, which appears whole or not at all; opts as for opening: parts,
 * threads, target, host's matrices, progress. An embedding is not packed and may be nobody's; an LM head
 * must be somebody's. In memory there are a few pieces of a weight at a time, and
 * all of the Markov head's W2.
 * May wait up to three seconds for files that have just been written: until then, their times cannot
 * tell whether they change again. DSPARK_EOUTPUT when `out` cannot be written. */
DSPARK_API dspark_status dspark_prepack(const char *path, const char *out,
                                        const dspark_model_opts *opts, dspark_error *err);
/* The DSPARK_PART_* that the prepacked file at `path` holds; its head and table are checked, not its
 * weights. DSPARK_EIO, DSPARK_EFORMAT, DSPARK_EUNSUPPORTED as in opening. */
DSPARK_API dspark_status dspark_prepacked_parts(const char *path, uint32_t *parts, dspark_error *err);
/* Prove that the prepacked file `file` is whole and what the checkpoint at `path` packs to: everything is
 * read and hashed, nothing is kept. Parts are those of the file; of opts count threads, target, host's
 * LM head and progress. Errors as in opening. */
DSPARK_API dspark_status dspark_prepacked_check(const char *path, const char *file,
                                                const dspark_model_opts *opts, dspark_error *err);
DSPARK_API void dspark_model_close(dspark_model *model);
DSPARK_API const dspark_config *dspark_model_config(const dspark_model *model);
/* The width of one cache entry in elements: kv_lora_rank + qk_rope_head_dim. */
DSPARK_API uint32_t dspark_model_entry_width(const dspark_model *model);
/* Bytes of packed weights that the model holds, or maps from a prepacked file. */
DSPARK_API uint64_t dspark_model_resident_bytes(const dspark_model *model);
/* 32 hex digits over config and the data of the context tensors (XXH3-128; docs/formats.md). */
DSPARK_API const char *dspark_model_fingerprint(const dspark_model *model);
/* The same over the block's and heads' weights and the LM head (not the embedding, which is looked up
 * in place); "" without DSPARK_PART_BLOCK. */
DSPARK_API const char *dspark_model_block_fingerprint(const dspark_model *model);

/* ------------------------------------------------------------------------------------------------
 * Latent cache
 * --------------------------------------------------------------------------------------------- */

typedef enum dspark_cache_dtype {
    DSPARK_CACHE_BF16 = 0,       /* entry_width * 2 bytes, raw */
    DSPARK_CACHE_FP8_E4M3 = 1,   /* entry_width bytes: e4m3(x / scale), saturating at 448 */
    DSPARK_CACHE_FP8_E5M2 = 2,   /* entry_width bytes: e5m2(x / scale), saturating at 57344 */
    DSPARK_CACHE_FP8_DS_MLA = 3  /* 656 bytes: 512 e4m3 in 4 tiles, 4 f32 scales, 64 bf16 */
} dspark_cache_dtype;

/* How the tile scale of DSPARK_CACHE_FP8_DS_MLA is made from a tile's largest magnitude. */
typedef enum dspark_tile_scale {
    DSPARK_TILE_SCALE_POW2 = 0,  /* max(amax / 448, 1e-4), rounded up to a power of two */
    DSPARK_TILE_SCALE_EXACT = 1  /* max(amax / 448, FLT_MIN) */
} dspark_tile_scale;

/* Bytes of one entry, or 0 when the dtype does not fit the widths (fp8_ds_mla needs 512 and 64). */
DSPARK_API size_t dspark_cache_entry_bytes(dspark_cache_dtype dtype, uint32_t kv_lora_rank,
                                           uint32_t qk_rope_head_dim);
/* "bf16", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla". Static storage. */
DSPARK_API const char *dspark_cache_dtype_name(dspark_cache_dtype dtype);

/* A paged cache in memory that the caller owns. Entry of slot s in layer l, at any alignment:
 *   layers[l] + (s / block_size) * block_stride + (s % block_size) * entry_stride
 * Nothing outside the entries is ever written. */
typedef struct dspark_cache_view {
    size_t struct_size;
    uint32_t n_layers;
    void *const *layers;       /* [n_layers] base pointers; NULL: this layer is skipped */
    uint64_t n_blocks;         /* blocks in each layer: slots are < n_blocks * block_size */
    uint32_t block_size;       /* entries in a block */
    size_t block_stride;       /* bytes; 0 = block_size * entry_stride */
    size_t entry_stride;       /* bytes; 0 = entry bytes */
    dspark_cache_dtype dtype;
    dspark_tile_scale tile_scale;
    const float *scales;       /* [n_layers] for the plain fp8 dtypes; NULL = 1.0. Others ignore it */
} dspark_cache_view;
DSPARK_API void dspark_cache_view_init(dspark_cache_view *view);

/* A cache that owns its memory (one allocation, zeroed, no padding between entries). */
typedef struct dspark_cache dspark_cache;
DSPARK_API dspark_status dspark_cache_create(dspark_cache **out, const dspark_model *model,
                                             dspark_cache_dtype dtype, uint32_t block_size,
                                             uint64_t n_blocks, const dspark_allocator *allocator,
                                             dspark_error *err);
DSPARK_API void dspark_cache_free(dspark_cache *cache);
/* The view of an owned cache; valid until it is freed. Its scales and tile_scale may be set in a
 * copy of the view. */
DSPARK_API const dspark_cache_view *dspark_cache_get_view(const dspark_cache *cache);
/* Bytes that dspark_cache_create allocates for entries; 0 when the size overflows or does not fit. */
DSPARK_API uint64_t dspark_cache_bytes(const dspark_config *config, dspark_cache_dtype dtype,
                                       uint32_t block_size, uint64_t n_blocks);

/* Slots of positions through a sequence's block table:
 *   slots[i] = block_table[positions[i] / block_size] * block_size + positions[i] % block_size.
 * A negative block id gives slot -1; with null_block >= 0, that block id does so too.
 * DSPARK_ERANGE when a position is negative or beyond the table. */
DSPARK_API dspark_status dspark_slots_from_blocks(const int32_t *block_table, size_t n_table,
                                                  uint32_t block_size, int32_t null_block,
                                                  const int64_t *positions, size_t n,
                                                  int64_t *slots, dspark_error *err);

/* ------------------------------------------------------------------------------------------------
 * Context KV
 * --------------------------------------------------------------------------------------------- */

/* Three ways to the same bits. */
typedef enum dspark_path {
    DSPARK_PATH_ONEPASS = 0,   /* one merged linear over all layers, norm, RoPE and write per tile */
    DSPARK_PATH_PER_LAYER = 1, /* one 576-row linear after the other */
    DSPARK_PATH_FULL = 2       /* 2112-row Q+KV linears, Q thrown away: what the one pass replaces */
} dspark_path;

typedef struct dspark_context_opts {
    size_t struct_size;
    dspark_isa isa;               /* DSPARK_EUNSUPPORTED when this machine lacks it */
    uint32_t n_threads;           /* 0 = all processors this process may use */
    const dspark_parallel *parallel; /* NULL = an own pool of up to n_threads - 1 */
    const dspark_allocator *allocator;
    dspark_path path;
    uint32_t max_tokens;          /* rows per chunk; longer batches are cut; 0 = 512 */
    uint64_t workspace_limit;     /* bytes; 0 = none. Lowers max_tokens until the plan fits */
} dspark_context_opts;
DSPARK_API void dspark_context_opts_init(dspark_context_opts *opts);

/* Bytes of workspace that a context with these options takes, and the rows per chunk it will use.
 * A pure function: same input, same answer, on every machine (n_threads must then be given).
 * DSPARK_ENOSPACE when even one row does not fit workspace_limit. */
typedef struct dspark_context_plan {
    uint64_t workspace_bytes;
    uint32_t max_tokens;
    uint32_t n_threads;
} dspark_context_plan;
DSPARK_API dspark_status dspark_plan_context(const dspark_config *config,
                                             const dspark_context_opts *opts,
                                             dspark_context_plan *plan, dspark_error *err);

typedef struct dspark_context dspark_context;

/* Everything is allocated here; dspark_context_run and its kin allocate nothing. The model must
 * outlive the context. */
DSPARK_API dspark_status dspark_context_create(dspark_context **out, const dspark_model *model,
                                               const dspark_context_opts *opts, dspark_error *err);
DSPARK_API void dspark_context_free(dspark_context *ctx);
/* The level, thread count and chunk size in use. */
DSPARK_API dspark_isa dspark_context_isa(const dspark_context *ctx);
DSPARK_API dspark_context_plan dspark_context_get_plan(const dspark_context *ctx);

/* Rows of one call; they may belong to any number of sequences. Exactly one of taps and states. */
typedef struct dspark_batch {
    size_t struct_size;
    size_t n_tokens;
    const void *taps;             /* [n, T * tap_width] bf16, any alignment */
    size_t taps_stride;           /* bytes between rows; 0 = dense */
    const void *states;           /* [n, h] bf16: rows already projected and normed */
    size_t states_stride;         /* bytes between rows; 0 = dense */
    const int64_t *positions;     /* [n] */
    const int64_t *slots;         /* [n] for all layers, or NULL */
    const int64_t *const *layer_slots; /* or: [n_layers] of [n]; a NULL entry skips that layer */
    size_t first_row;             /* what row 0 is to the caller: errors name row first_row + i */
} dspark_batch;
DSPARK_API void dspark_batch_init(dspark_batch *batch);

/* What a run did. Filled also on failure. */
typedef struct dspark_run_info {
    size_t n_rows;         /* rows of this call whose entries are complete in the cache */
    size_t n_written;      /* entries written, over all layers */
    size_t n_skipped;      /* rows with a negative slot (or no mapping) in every layer */
    int64_t max_position;  /* largest position of a written row, -1 for none */
} dspark_run_info;

/* Hidden states to cache entries of every layer, in one pass.
 * A row whose slot is negative in a layer leaves that layer untouched; a row that is negative
 * everywhere is not read at all (neither its taps nor its position). Everything about all rows is
 * checked before the first write: DSPARK_ERANGE (position, slot), DSPARK_EINVAL, and
 * DSPARK_ENONFINITE when taps or states hold NaN or infinity. An entry that overflows in the
 * arithmetic is never written: the run finishes its chunk, stops with DSPARK_ENONFINITE naming the
 * first row and layer (the same for every max_tokens), and info->n_rows says how many rows before that
 * chunk are complete. err->where is "states" or "entries", or the checkpoint's tensor or module when the
 * row's numbers are ordinary (at most 1e6).
 * When two rows name one slot of a layer, the later row wins.
 * info may be NULL. Allocates nothing. */
DSPARK_API dspark_status dspark_context_run(dspark_context *ctx, const dspark_batch *batch,
                                            const dspark_cache_view *cache,
                                            dspark_run_info *info, dspark_error *err);

/* The first half alone: taps -> states, [n, h] bf16 dense. Needs batch->taps; positions and slots
 * are not read. */
DSPARK_API dspark_status dspark_context_states(dspark_context *ctx, const dspark_batch *batch,
                                               void *states, dspark_error *err);

/* The same mathematics in fp64 without any rounding in between, from the checkpoint's own bytes:
 * entries [n_layers][n][entry_width] (latent | rope key). The angle keeps its fp32 product, which
 * is part of the model's definition. Slow; for `compare`. */
DSPARK_API dspark_status dspark_context_fp64(dspark_context *ctx, const dspark_batch *batch,
                                             double *entries, dspark_error *err);

/* ------------------------------------------------------------------------------------------------
 * Sampling, verification, scheduling: rows of numbers in, no model. docs/verification.md has the
 * formulas. All functions are pure, thread-safe and allocate nothing unless they say so.
 * --------------------------------------------------------------------------------------------- */

/* Applied in this order: temperature, top_k, top_p, min_p; ties keep the lower id. */
typedef struct dspark_sampling {
    size_t struct_size;
    float temperature;          /* 0 = greedy */
    uint32_t top_k;             /* 0 = off */
    float top_p;                /* 1 = off */
    float min_p;                /* 0 = off */
} dspark_sampling;
DSPARK_API void dspark_sampling_init(dspark_sampling *s);

/* logits [vocab] (DSPARK_BF16 or DSPARK_F32, any alignment) to probabilities that sum to 1. Temperature
 * 0 gives 1 to the largest, the lowest id on ties. The same bits on every machine. DSPARK_ENONFINITE
 * for a NaN, +infinity or nothing but -infinity: probs is then not a distribution. */
DSPARK_API dspark_status dspark_distribution(const dspark_sampling *s, const void *logits,
                                             dspark_dtype dtype, size_t vocab, float *probs,
                                             dspark_error *err);

/* Noise is a function of its key: neighbours, batches and retries change nothing, and drafter and
 * verifier never share a number. position: of the token that is drawn or judged. sequence: the host's
 * number of a request; timelines that are to be independent (forks, another try) need different ones.
 * block: the position of the block's first draft, so that a block never meets noise that the one before
 * has looked at behind its end (docs/verification.md, section 2). dspark_draft and dspark_verify put it
 * in themselves; only who draws drafts with dspark_sample sets it. */
typedef enum dspark_noise {
    DSPARK_NOISE_DRAFT = 1, DSPARK_NOISE_ACCEPT = 2, DSPARK_NOISE_RESIDUAL = 3, DSPARK_NOISE_BONUS = 4
} dspark_noise;
typedef struct dspark_noise_key {
    uint64_t seed, sequence, position;
    dspark_noise purpose;
    uint64_t block;
} dspark_noise_key;

/* In [0, 1), a multiple of 2^-53 (Philox4x32-10). */
DSPARK_API double dspark_uniform(const dspark_noise_key *key);
/* A token of a distribution, by inversion in order of ids. Never one of probability 0. token is -1 and
 * the status DSPARK_ENONFINITE when an entry is NaN, infinite or negative, or all are 0. */
DSPARK_API dspark_status dspark_sample(const float *probs, size_t vocab, const dspark_noise_key *key,
                                       int32_t *token, dspark_error *err);

typedef struct dspark_verdict_tokens {
    uint32_t n_accepted;        /* drafts that stand, from the first on */
    int32_t next;               /* the token after them, the target's own */
} dspark_verdict_tokens;

/* Greedy: target_argmax[i] is what the target would say after draft i-1; [n + 1] of them. */
DSPARK_API dspark_status dspark_verify_greedy(const int32_t *drafts, size_t n,
                                              const int32_t *target_argmax, size_t vocab,
                                              dspark_verdict_tokens *out, dspark_error *err);

typedef enum dspark_verify_method {
    DSPARK_VERIFY_TOKEN = 0, /* one by one */
    DSPARK_VERIFY_BLOCK = 1  /* the block as a whole: never fewer on average */
} dspark_verify_method;

/* Rejection sampling: the output has the target's distribution. p [n + 1][vocab]: the target's after the
 * anchor and each draft. q [n][vocab]: the distributions that the drafts were drawn from, exactly; or
 * one_hot (greedy drafts) and q NULL. key: seed, sequence, and the position of draft 0, which is also
 * its block. Rows must be distributions (finite, >= 0, sum 1 within 1e-3) and q[i][drafts[i]] > 0, else DSPARK_EINVAL. p and q
 * are not changed. */
DSPARK_API dspark_status dspark_verify(dspark_verify_method method, const int32_t *drafts, size_t n,
                                       const float *q, int one_hot, const float *p, size_t vocab,
                                       const dspark_noise_key *key, dspark_verdict_tokens *out,
                                       dspark_error *err);

/* Counters by position in the block. */
#define DSPARK_MAX_COUNTED 32
typedef struct dspark_acceptance {
    uint64_t n_blocks;
    uint64_t drafted[DSPARK_MAX_COUNTED];  /* blocks that had a draft at this position */
    uint64_t accepted[DSPARK_MAX_COUNTED]; /* and it stood, with all before it */
} dspark_acceptance;
DSPARK_API void dspark_acceptance_add(dspark_acceptance *a, uint32_t n_drafted, uint32_t n_accepted);
/* Mean accepted drafts of a block; with_bonus: and the target's own token. 0 without blocks. */
DSPARK_API double dspark_acceptance_length(const dspark_acceptance *a, int with_bonus);

/* survival[k] = confidence[0] * .. * confidence[k]. survival may be confidence. */
DSPARK_API void dspark_survival(const float *confidence, uint32_t n, float *survival);
/* Drafts to keep: those before the first whose survival is below threshold; all when it is <= 0. */
DSPARK_API uint32_t dspark_keep_static(const float *confidence, uint32_t n, float threshold);

/* Target steps per second when B tokens go through one step: of the smallest size >= B; beyond the
 * largest, its rate times size / B. */
typedef struct dspark_step_table {
    uint32_t n;
    const uint32_t *tokens;          /* [n] ascending, > 0 */
    const double *steps_per_second;  /* [n] finite, > 0 */
} dspark_step_table;
DSPARK_API double dspark_steps_per_second(const dspark_step_table *table, uint64_t tokens);

/* How many drafts of each of R sequences to verify (the paper's Algorithm 1): admitted in order of
 * survival while expected tokens per second rise, stopped at the first that does not pay. Because of
 * that stop no decision depends on a token it is about, so the output keeps the target's law.
 * confidence [R][stride], of which n_drafted[r] count; keep [R]. */
DSPARK_API dspark_status dspark_schedule(const float *confidence, size_t stride,
                                         const uint32_t *n_drafted, size_t n_sequences,
                                         const dspark_step_table *table, uint32_t *keep,
                                         dspark_error *err);
/* The production variant: how many in all is decided by `stale` (confidences of an earlier step, by the
 * best rate over every number); present confidences only rank. Lossless because stale ones cannot know
 * present tokens: every block draws from noise of its own. Layout as above; stale [R][stride], unknown
 * = 1. */
DSPARK_API dspark_status dspark_schedule_stale(const float *stale, const float *confidence,
                                               size_t stride, const uint32_t *n_drafted,
                                               size_t n_sequences, const dspark_step_table *table,
                                               uint32_t *keep, dspark_error *err);

/* Sequential temperature scaling of the confidence: T_1 .. T_n, each chosen on held-out records with
 * those before it fixed, so that survival is calibrated. */
typedef struct dspark_calibration {
    uint32_t n;
    double temperatures[256];
} dspark_calibration;
/* confidence [n][k] probabilities, accepted [n] how many drafts stood (0 .. k). k <= 256. */
DSPARK_API dspark_status dspark_calibration_fit(dspark_calibration *out, const float *confidence,
                                                const uint8_t *accepted, size_t n, uint32_t k,
                                                dspark_error *err);
/* probabilities[i] = sigmoid(logits[i] / T_i); positions beyond out->n keep T = 1. */
DSPARK_API void dspark_calibration_apply(const dspark_calibration *c, const float *logits, uint32_t k,
                                         float *probabilities);
/* A small JSON file, complete or not there. Allocates. */
DSPARK_API dspark_status dspark_calibration_save(const dspark_calibration *c, const char *path,
                                                 dspark_error *err);
DSPARK_API dspark_status dspark_calibration_load(dspark_calibration *out, const char *path,
                                                 dspark_error *err);

/* Of probabilities p[n] against outcomes y[n] (0 or 1): expected calibration error over equal bins,
 * mean squared error, area under the ROC curve (ties count half; NaN when y is constant; allocates). NaN
 * for n == 0; of ece and brier also when a p is no number, of ece outside 0 to 1. auc takes any scores but
 * NaN: those are DSPARK_EINVAL. */
DSPARK_API double dspark_ece(const float *p, const uint8_t *y, size_t n, size_t bins);
DSPARK_API double dspark_brier(const float *p, const uint8_t *y, size_t n);
DSPARK_API dspark_status dspark_auc(const float *p, const uint8_t *y, size_t n, double *auc,
                                    dspark_error *err);

/* ------------------------------------------------------------------------------------------------
 * Drafting
 *
 * A block is the anchor (the target's last token, not yet run through it) and N-1 masks, at positions
 * position .. position+N-1. Its rows pass the draft's layers over the context entries and each other;
 * the heads then take N tokens from left to right. The whole trained block is computed, however few
 * tokens are wanted. Drafting reads the cache and never writes to it: the block's own entries live in
 * the workspace (rounded as the cache's dtype would round them).
 * --------------------------------------------------------------------------------------------- */

typedef struct dspark_drafter_opts {
    size_t struct_size;
    dspark_isa isa;
    uint32_t n_threads;              /* 0 = all processors this process may use */
    const dspark_parallel *parallel; /* NULL = an own pool of up to n_threads - 1 */
    const dspark_allocator *allocator;
    uint32_t max_sequences;          /* sequences of one call that go together; longer calls are cut;
                                      * 0 = 1 */
    uint32_t max_tokens;             /* rows per chunk when context is appended; 0 = 512 */
    uint64_t workspace_limit;        /* bytes; 0 = none. Lowers max_tokens, then max_sequences */
} dspark_drafter_opts;
DSPARK_API void dspark_drafter_opts_init(dspark_drafter_opts *opts);

typedef struct dspark_drafter_plan {
    uint64_t workspace_bytes;  /* context and block together */
    uint32_t max_sequences;
    uint32_t max_tokens;
    uint32_t n_threads;
} dspark_drafter_plan;
/* Pure, like dspark_plan_context; n_threads must be given. */
DSPARK_API dspark_status dspark_plan_drafter(const dspark_config *config,
                                             const dspark_drafter_opts *opts,
                                             dspark_drafter_plan *plan, dspark_error *err);

/* The compute side: threads and workspace for context and block. The model (opened with
 * DSPARK_PART_BLOCK) must outlive it. Serves one caller at a time; any number of drafters may share a
 * model. Everything is allocated here. */
typedef struct dspark_drafter dspark_drafter;
DSPARK_API dspark_status dspark_drafter_create(dspark_drafter **out, const dspark_model *model,
                                               const dspark_drafter_opts *opts, dspark_error *err);
DSPARK_API void dspark_drafter_free(dspark_drafter *d);
DSPARK_API dspark_drafter_plan dspark_drafter_get_plan(const dspark_drafter *d);
/* The context half of the drafter, for hosts that own their cache: use it for dspark_context_run, not
 * while a draft is running. Owned by the drafter. */
DSPARK_API dspark_context *dspark_drafter_context(dspark_drafter *d);

/* One sequence of a call. The context is a list of n_context cache entries, in order of position:
 * slots, or a block table (entry i at block_table[i / block_size] * block_size + i % block_size). */
typedef struct dspark_draft_input {
    size_t struct_size;
    int64_t anchor;             /* token id */
    int64_t position;           /* of the anchor, in the model's range */
    uint64_t n_context;         /* entries; 0 is allowed */
    const int64_t *slots;       /* [n_context], all >= 0; or NULL */
    const int32_t *block_table; /* [n_table], when slots is NULL */
    size_t n_table;
    uint64_t window;            /* attend to the last `window` entries only; 0 = all */
    uint32_t n_draft;           /* tokens wanted, 1 .. N; 0 = N */
    const dspark_sampling *sampling; /* NULL: greedy */
    uint64_t seed, sequence;    /* key of the noise, with positions (docs/verification.md) */
    const int32_t *forced;      /* [n_draft] or NULL. Teacher forcing, for measuring: the heads go on from
                                 * these tokens; tokens and probs are still what they would choose */
} dspark_draft_input;
DSPARK_API void dspark_draft_input_init(dspark_draft_input *in);

/* What one sequence got. Pointers are the caller's, NULL where not wanted; tokens is needed. */
typedef struct dspark_draft_output {
    size_t struct_size;
    int32_t *tokens;            /* [N] */
    float *confidence;          /* [N]: probability that token k is accepted when all before it are;
                                 * 1 without a confidence head */
    float *confidence_logits;   /* [N] before the sigmoid; 0 without a head */
    float *probs;               /* [N][vocab]: the distribution drafted from (one-hot when greedy) */
    uint16_t *logits;           /* [N][vocab] bf16, Markov bias added */
    uint16_t *base_logits;      /* [N][vocab] bf16, before it */
    uint16_t *hidden;           /* [N][h] bf16 after final_norm */
    /* Filled by the call: */
    dspark_status status;       /* of this sequence */
    uint32_t n_tokens;          /* tokens given; 0 unless status is DSPARK_OK. Fewer than asked for when
                                 * a token would lie beyond the model's positions */
    int beyond_original;        /* 1: the block leaves rope_original_max_positions (YaRN) */
} dspark_draft_output;
DSPARK_API void dspark_draft_output_init(dspark_draft_output *out);

/* Draft a block for n sequences, each as if it were alone. All inputs are checked before any work:
 * DSPARK_EINVAL or DSPARK_ERANGE names the first bad one and nothing is drafted. What goes wrong in
 * one sequence later is its output's status (DSPARK_ENONFINITE: numbers in the cache, hidden states or
 * logits that are none), never a token; the others are not touched by it. The call then returns
 * DSPARK_OK. Allocates nothing. */
DSPARK_API dspark_status dspark_draft(dspark_drafter *d, const dspark_cache_view *cache,
                                      const dspark_draft_input *in, dspark_draft_output *out,
                                      size_t n, dspark_error *err);

/* The LM head alone: bf16 logits [n][vocab] (logit_scale applied, no Markov bias) of n rows of hidden
 * states [h] bf16 that have passed the final norm, for example the verifier's own. stride in bytes,
 * 0 = dense. DSPARK_ENONFINITE names a row. Allocates nothing. */
DSPARK_API dspark_status dspark_head_logits(dspark_drafter *d, const void *hidden, size_t stride,
                                            size_t n, uint16_t *logits, dspark_error *err);

/* Where the time of the last dspark_draft went, in nanoseconds; and what the Markov head read. A greedy
 * token needs the largest of logits + W2 . e only: codes of W2's rows tell which rows cannot be it, and
 * these are not read. The tokens are the same. */
typedef struct dspark_draft_times {
    uint64_t total;
    uint64_t embed, norms;      /* norms: RMSNorm, RoPE, residuals, SwiGLU's product */
    uint64_t qkv_a, q_b, absorb, attention, v_up, o;
    uint64_t gate_up, down;
    uint64_t lm_head, markov, confidence, sample;
    uint64_t markov_rows;         /* rows of W2, for each token of each sequence */
    uint64_t markov_rows_bounded; /* of them, those whose codes were read */
    uint64_t markov_rows_read;    /* those that were read themselves (those of a sampled or stored row all) */
    uint64_t markov_bytes;        /* bytes of W2 and of codes, each once a step for all sequences */
} dspark_draft_times;
DSPARK_API dspark_draft_times dspark_drafter_times(const dspark_drafter *d);

/* ------------------------------------------------------------------------------------------------
 * Sessions
 *
 * One sequence's timeline over a pool of cache blocks. A step of an engine:
 *
 *     dspark_session_append(s, d, length, taps of every new target position, ...)   after prefill
 *     loop:
 *         dspark_session_draft(s, d, &in, &out)       anchor = the target's last token
 *         target runs anchor + drafts in one pass, verifies: n_accepted, next token (dspark_verify_*)
 *         dspark_session_append(s, d, length, taps of the verified rows, ...)
 *         dspark_session_accept(s, n_accepted)         rows behind the accepted ones vanish
 *
 * docs/embedding.md walks through prefill, decode, rejection and prefix-cache hits.
 * --------------------------------------------------------------------------------------------- */

typedef struct dspark_pool_opts {
    size_t struct_size;
    const dspark_allocator *allocator;
    dspark_cache_dtype dtype;
    dspark_tile_scale tile_scale;
    const float *scales;        /* [n_layers] for the plain fp8 dtypes; copied; NULL = 1.0 */
    uint32_t block_size;        /* entries in a block; 0 = 64 */
    uint64_t n_blocks;          /* the hard cap; 0 = as many as max_sessions x max_length needs */
    uint32_t max_sessions;      /* 0 = 1 */
    uint64_t max_length;        /* positions of one session; 0 = the model's (with n_blocks: what
                                 * the blocks hold, if that is less) */
} dspark_pool_opts;
DSPARK_API void dspark_pool_opts_init(dspark_pool_opts *opts);

typedef struct dspark_pool_info {
    uint64_t n_blocks, free_blocks;
    uint32_t block_size;
    uint32_t max_sessions, open_sessions;
    uint64_t max_length;
    uint64_t bytes;             /* all memory of the pool: entries, tables, sessions */
    uint64_t bytes_per_position;/* over all layers, no padding */
} dspark_pool_info;
/* What a pool with these options takes. Pure. */
DSPARK_API dspark_status dspark_plan_pool(const dspark_config *config, const dspark_pool_opts *opts,
                                          dspark_pool_info *info, dspark_error *err);

/* Everything is allocated here; sessions allocate nothing. Thread-safe: sessions of one pool may be
 * used from different threads at once (each with a drafter of its own); one session serves one caller
 * at a time. The model must outlive the pool; free closes its sessions. */
typedef struct dspark_pool dspark_pool;
DSPARK_API dspark_status dspark_pool_create(dspark_pool **out, const dspark_model *model,
                                            const dspark_pool_opts *opts, dspark_error *err);
DSPARK_API void dspark_pool_free(dspark_pool *pool);
DSPARK_API dspark_pool_info dspark_pool_get_info(dspark_pool *pool);

typedef struct dspark_session dspark_session;

/* An empty timeline. DSPARK_ENOSPACE when max_sessions are open. */
DSPARK_API dspark_status dspark_session_open(dspark_session **out, dspark_pool *pool,
                                             dspark_error *err);
/* Its blocks go back to the pool. Accepts NULL. */
DSPARK_API void dspark_session_close(dspark_session *s);
/* Context positions so far: 0 .. length-1 have entries. */
DSPARK_API uint64_t dspark_session_length(const dspark_session *s);

/* Rows of taps [n, T * tap_width] for positions first .. first+n-1; first must be the length.
 * A position that is there already or a gap is DSPARK_ERANGE (length says where to go on; rewind to
 * replace). taps_width is the number of elements that the host believes a row has: another width than
 * the model's is DSPARK_EINVAL. DSPARK_ENOSPACE when the pool or max_length is exhausted: nothing is
 * appended. DSPARK_ENONFINITE names a row; rows before its chunk stay appended (length says so). */
DSPARK_API dspark_status dspark_session_append(dspark_session *s, dspark_drafter *d, uint64_t first,
                                               const void *taps, size_t taps_width,
                                               size_t taps_stride, size_t n, dspark_error *err);

/* Draft at position = length. in's position, n_context, slots and block_table are filled here and need
 * not be set. DSPARK_EINVAL when the drafter serves another model. */
DSPARK_API dspark_status dspark_session_draft(dspark_session *s, dspark_drafter *d,
                                              const dspark_draft_input *in,
                                              dspark_draft_output *out, dspark_error *err);
/* The same for n sessions of one pool in one pass; each as if alone. A session may occur twice. */
DSPARK_API dspark_status dspark_sessions_draft(dspark_session *const *s, dspark_drafter *d,
                                               const dspark_draft_input *in,
                                               dspark_draft_output *out, size_t n,
                                               dspark_error *err);

/* The target accepted the first n_accepted of the last draft's tokens: the timeline becomes the
 * anchor's position + 1 + n_accepted long. The verified rows must have been appended; those behind are
 * made invisible by a counter, nothing is copied. DSPARK_EINVAL without a draft since the last accept,
 * with more than was drafted, or when rows are missing. */
DSPARK_API dspark_status dspark_session_accept(dspark_session *s, uint32_t n_accepted,
                                               dspark_error *err);
/* Forget positions from `length` on (<= the present length). Blocks that become empty go back. */
DSPARK_API dspark_status dspark_session_rewind(dspark_session *s, uint64_t length,
                                               dspark_error *err);
/* A second timeline with the same past. Blocks are shared; the one that either goes on in is copied when
 * it is appended to (which takes a block: DSPARK_ENOSPACE is possible then). */
DSPARK_API dspark_status dspark_session_fork(dspark_session **out, dspark_session *s,
                                             dspark_error *err);

/* Snapshot: one safetensors file with the entries, their dtype and scales, and the model's fingerprint.
 * Written to a temporary name, synced and renamed. */
DSPARK_API dspark_status dspark_session_save(dspark_session *s, const char *path,
                                             dspark_error *err);
/* A new session from a file. DSPARK_EMODEL when the fingerprint, the dtype or a scale is another. */
DSPARK_API dspark_status dspark_session_load(dspark_session **out, dspark_pool *pool,
                                             const char *path, dspark_error *err);

/* Drafted and accepted tokens by position since the session was opened or loaded. */
DSPARK_API void dspark_session_acceptance(const dspark_session *s, dspark_acceptance *out);

/* ------------------------------------------------------------------------------------------------
 * Synthetic checkpoints and dumps
 * --------------------------------------------------------------------------------------------- */

/* A preset must be named: there is none by default, as the likeliest would write 7 GB. */
typedef struct dspark_synth_opts {
    size_t struct_size;
    const char *preset;          /* kimi-k3 | kimi-k3-block5 | kimi-k3.1-pro | lightseek | tiny */
    const char *const *settings; /* [n_settings] "key=value": config keys, value in JSON */
    size_t n_settings;
    uint64_t seed;
    uint64_t shard_bytes;        /* 0 = one file; else a shard is closed when it would grow over */
    int context_only;            /* only the tensors context KV needs; config.json says so */
    dspark_progress progress;    /* bytes */
    void *progress_user;
} dspark_synth_opts;
DSPARK_API void dspark_synth_opts_init(dspark_synth_opts *opts);

/* Write dir/config.json and dir/model*.safetensors. The directory is made if it is missing; files
 * of a former checkpoint in it are refused. Same options, same bytes (docs/formats.md). */
DSPARK_API dspark_status dspark_synth_checkpoint(const char *dir, const dspark_synth_opts *opts,
                                                 dspark_error *err);
/* A hidden-state dump in the extraction format for the checkpoint at `ckpt`: token_ids [n] I64,
 * hidden_states [n, T+1, tap_width] BF16. */
DSPARK_API dspark_status dspark_synth_dump(const char *file, const char *ckpt, uint64_t n_tokens,
                                           uint64_t seed, dspark_progress progress,
                                           void *progress_user, dspark_error *err);

/* ------------------------------------------------------------------------------------------------
 * Quantising a checkpoint
 * --------------------------------------------------------------------------------------------- */

/* What a weight is stored as; docs/formats.md has the formulas. */
typedef enum dspark_format {
    DSPARK_FORMAT_NONE = 0,
    DSPARK_FORMAT_FP8_TENSOR,  /* E4M3, one scale for the tensor */
    DSPARK_FORMAT_FP8_CHANNEL, /* E4M3, one scale for each output */
    DSPARK_FORMAT_FP8_BLOCK,   /* E4M3, one scale for 128 x 128 weights */
    DSPARK_FORMAT_NVFP4,       /* E2M1, an E4M3 scale for 16 weights, one scale for the tensor */
    DSPARK_FORMAT_MXFP4,       /* E2M1, a power of two for 32 weights */
    DSPARK_FORMAT_MXFP8,       /* E4M3, a power of two for 32 weights */
    DSPARK_FORMAT_INT8,        /* 8-bit integers, one scale for each output */
    DSPARK_FORMAT_INT4,        /* 4-bit integers, one scale for a group of weights */
    DSPARK_FORMAT_BF16,        /* the way back: every quantised weight as BF16, rounded once */
    DSPARK_FORMAT_COUNT
} dspark_format;

/* "fp8-tensor", "fp8-channel", "fp8-block", "nvfp4", "mxfp4", "mxfp8", "int8", "int4", "bf16"; "?" for
 * other values. Static storage. */
DSPARK_API const char *dspark_format_name(dspark_format format);

typedef enum dspark_scale_search {
    DSPARK_SCALES_ABSMAX = 0, /* the largest magnitude becomes the largest code */
    DSPARK_SCALES_MSE = 1     /* the scale with the least squared error among a few below (and above) */
} dspark_scale_search;

typedef enum dspark_layout {
    DSPARK_LAYOUT_COMPRESSED_TENSORS = 0,
    DSPARK_LAYOUT_MODELOPT = 1 /* fp8-tensor and nvfp4 only */
} dspark_layout;

/* One module that was quantised, or that was before and is BF16 now; measured on what was read back. */
typedef struct dspark_quantize_report {
    const char *name;      /* the module: "layers.0.mlp.up_proj" */
    const char *format;    /* dspark_format_name */
    uint64_t rows, k;
    uint64_t bytes_before; /* all its tensors */
    uint64_t bytes_after;
    double max_abs_error;  /* largest |after - before| */
    double relative_rms;   /* sqrt(sum (after - before)^2 / sum before^2); 0 for a weight of zeros */
    double sqnr_db;        /* -20 log10(relative_rms); infinite when nothing was lost */
} dspark_quantize_report;

/* A format must be named. Patterns are module names, shell wildcards (a *), or "re:" and a regular
 * expression anchored at the start.
 * Which modules: all linear layers, without kv_b_proj (other programs absorb it into others), the
 * Markov head and the confidence head. With targets: exactly the linear layers that match one.
 * Always without what matches ignore. Lookup tables (embed_tokens, markov_w1) and norms are never
 * quantised. A pattern that matches no linear layer is DSPARK_EINVAL.
 * DSPARK_FORMAT_BF16 takes the whole checkpoint and none of the choices. */
typedef struct dspark_quantize_opts {
    size_t struct_size;
    dspark_format format;
    dspark_scale_search scales;
    dspark_layout layout;
    uint32_t group_size;         /* INT4: weights of a scale, a multiple of 8; 0 = 128 */
    const char *const *ignore;   /* [n_ignore] */
    size_t n_ignore;
    const char *const *targets;  /* [n_targets] */
    size_t n_targets;
    uint32_t n_threads;          /* 0 = all processors; no byte depends on it */
    dspark_progress progress;    /* bytes of weights passed over */
    void *progress_user;
    void (*report)(void *user, const dspark_quantize_report *report); /* in file order */
    void *report_user;
} dspark_quantize_opts;
DSPARK_API void dspark_quantize_opts_init(dspark_quantize_opts *opts);

/* Write the checkpoint at `ckpt` (a directory of this family, in any format that is read here) to the
 * directory `out`: its weights in the format asked for, all else as it was, config.json with its
 * quantization_config, an index where there are several files. One tensor at a time: memory does not
 * grow with the checkpoint. `out` is made if it is missing; files of a former checkpoint in it are
 * refused. Everything is read back and compared before it appears, config.json last; on failure
 * nothing is left. Modules that were quantised and are not to be are written as BF16.
 * DSPARK_ENONFINITE names a weight that is no number. */
DSPARK_API dspark_status dspark_quantize(const char *ckpt, const char *out,
                                         const dspark_quantize_opts *opts, dspark_error *err);

/* ------------------------------------------------------------------------------------------------
 * Measuring
 * --------------------------------------------------------------------------------------------- */

/* 128-bit XXH3 digest of bytes as 32 hex digits; for stage digests. hex holds 33 chars. */
DSPARK_API void dspark_digest(const void *data, size_t n_bytes, char hex[33]);

/* Register-only peak of the dot-product instruction of `isa` on n_threads, GFLOP/s, and read
 * bandwidth over a buffer, GB/s: of several rounds the best. Both take about `seconds`, at least three
 * rounds. The limits that bench prints. Put a large buffer into huge pages, as the library does with
 * weights: small ones are read 10 to 20 % slower. */
DSPARK_API dspark_status dspark_probe_compute(dspark_isa isa, uint32_t n_threads, double seconds,
                                              double *gflops, dspark_error *err);
DSPARK_API dspark_status dspark_probe_read(uint32_t n_threads, const void *buffer, size_t n_bytes,
                                           double seconds, double *gbytes_per_s,
                                           dspark_error *err);
/* The same arithmetic by the context's own threads, GFLOP/s during the next `seconds` (taken as 20 us to 1 s):
 * what they could do at this moment, not the best of several. Right before and after a call it tells whether each
 * of them had a processor to itself: two that share one show half. Touches no memory but the stack, so
 * caches stay as they are. Allocates nothing; like dspark_context_run, not while the context is in use. */
DSPARK_API dspark_status dspark_context_probe(dspark_context *ctx, double seconds, double *gflops,
                                              dspark_error *err);

#ifdef __cplusplus
}
#endif

#endif /* DSPARK_DSPARK_H */
