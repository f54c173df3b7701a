/* outputs: the files that a command is to write, looked at before it works. Writes nothing itself. */
#include "outputs.h"

#include "out.h"

int outputs_check(const args_command *command, const output_path *outputs, size_t n,
                  const char *const *inputs, size_t n_inputs)
{
    size_t i, k;
    int code;
    for (i = 0; i < n; i++) {
        const output_path *o = &outputs[i];
        const char *why = o->path ? out_refuse_target(o->path, NULL) : NULL;
        for (k = 0; o->path && !why && k < n_inputs; k++)
            if (inputs[k]) why = out_refuse_target(o->path, inputs[k]);
        if (why)
            return args_complain(command, "%s%s'%s' %s", o->option ? o->option : "",
                                 o->option ? ": " : "", o->path, why);
        for (k = 0; o->path && k < i; k++)
            if (outputs[k].path && out_same_target(o->path, outputs[k].path))
                return args_complain(command, "%s and %s name the same file", outputs[k].option,
                                     o->option);
    }
    for (i = 0; i < n; i++)
        if (outputs[i].path && outputs[i].late &&
            (code = out_file_try(outputs[i].path)) != EXIT_OK)
            return code;
    return ARGS_RUN;
}
