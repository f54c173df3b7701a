/* dspark: the command. Chooses a subcommand; everything else is in the file of that command.
 * Uses the public header only, so it is also the proof that the header is enough. */
#include <stdio.h>
#include <string.h>

#include "commands.h"
#include "out.h"

typedef struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} command;

static const command commands[] = {
    {"inspect", command_inspect, "say what a checkpoint is (and is not), and whether it is usable"},
    {"synth", command_synth, "write a synthetic checkpoint, or a hidden-state dump for one"},
    {"context", command_context, "turn a hidden-state dump into every layer's cache"},
    {"compare", command_compare, "prove the paths equal bit for bit, or compare two files of caches"},
    {"quantize", command_quantize, "write a checkpoint with quantised weights, and prove it"},
    {"pack", command_pack, "write a checkpoint's packed weights as one file to be mapped"},
    {"draft", command_draft, "draft blocks of tokens from a hidden-state dump"},
    {"eval", command_eval, "measure offline how many drafts the target accepts"},
    {"bench", command_bench, "time the one pass, what it replaces, and the machine's limits"},
};
#define N_COMMANDS (sizeof commands / sizeof *commands)

static void print_usage(FILE *f)
{
    size_t i;
    fprintf(f, "usage: dspark COMMAND [ARGUMENTS]\n"
               "       dspark COMMAND --help | dspark help COMMAND | dspark --version\n\n"
               "The DSpark draft model of Kimi-K3: context KV, drafts, and what they are worth.\n\n");
    for (i = 0; i < N_COMMANDS; i++)
        fprintf(f, "  %-8s  %s\n", commands[i].name, commands[i].summary);
    fprintf(f, "\nResults go to standard output, everything else to standard error.\n"
               "Exit codes: 0 ok, 1 the check said no, 2 usage or an output path that is taken,\n"
               "3 bad input file, 4 unsupported, 5 output not writable, out of memory or internal,\n"
               "130 cancelled.\n");
}

static const command *find_command(const char *name)
{
    size_t i;
    for (i = 0; i < N_COMMANDS; i++)
        if (strcmp(commands[i].name, name) == 0) return &commands[i];
    fprintf(stderr, "dspark: unknown command '");
    out_text(stderr, name);
    fprintf(stderr, "'; commands are");
    for (i = 0; i < N_COMMANDS; i++) fprintf(stderr, " %s", commands[i].name);
    fprintf(stderr, " help\n");
    return NULL;
}

static int run_help(int argc, char **argv)
{
    char help[] = "--help";
    char *help_args[3];
    const command *c;
    if (argc < 3) {
        print_usage(stdout);
        return EXIT_OK;
    }
    c = find_command(argv[2]);
    if (!c) return EXIT_USAGE;
    help_args[0] = argv[2];
    help_args[1] = help;
    help_args[2] = NULL;
    return c->run(2, help_args);
}

int main(int argc, char **argv)
{
    const command *c;
    out_start();
    if (argc < 2) {
        print_usage(stderr);
        return EXIT_USAGE;
    }
    if (strcmp(argv[1], "--version") == 0 || strcmp(argv[1], "version") == 0) {
        printf("dspark %s\n", dspark_version());
        return out_finish(EXIT_OK);
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        print_usage(stdout);
        return out_finish(EXIT_OK);
    }
    if (strcmp(argv[1], "help") == 0) return out_finish(run_help(argc, argv));
    c = find_command(argv[1]);
    if (!c) return EXIT_USAGE;
    return out_finish(c->run(argc - 1, argv + 1));
}
