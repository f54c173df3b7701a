/* The commands. Each parses its own arguments (argv[0] is its name) and returns an exit code. */
#ifndef DSPARK_CLI_COMMANDS_H
#define DSPARK_CLI_COMMANDS_H

int command_inspect(int argc, char **argv);
int command_synth(int argc, char **argv);
int command_context(int argc, char **argv);
int command_compare(int argc, char **argv);
int command_quantize(int argc, char **argv);
int command_pack(int argc, char **argv);
int command_draft(int argc, char **argv);
int command_eval(int argc, char **argv);
int command_bench(int argc, char **argv);

#endif
