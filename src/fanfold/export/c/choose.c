/* Which kernel of a function runs: the one whose choices are those of the call. */

typedef struct choice {
    const char *name;
    const char *const *words; /* of values, where they are words */
    int32_t word_count;
} choice;

static inline int check_size(const char *function, const char *name, int64_t found, int64_t least, fanfold_error *error)
{
    if (found < least || found > INT32_MAX)
        return fail(error, FANFOLD_INVALID_ARGUMENT, "%s: %s: found %lld, expected %lld to %d", function, name,
                    (long long)found, (long long)least, INT32_MAX);
    return FANFOLD_OK;
}

static inline int check_word(const char *function, const choice *asked, int64_t found, fanfold_error *error)
{
    if (found < 0 || found >= asked->word_count)
        return fail(error, FANFOLD_INVALID_ARGUMENT, "%s: %s: found %lld, expected 0 to %d", function, asked->name,
                    (long long)found, (int)asked->word_count - 1);
    return FANFOLD_OK;
}

static inline int check_most(const char *function, const char *what, const char *formula, int64_t found, int64_t most,
                      fanfold_error *error)
{
    if (found > most)
        return fail(error, FANFOLD_INVALID_ARGUMENT, "%s: %s (%s): found %lld, expected at most %lld", function, what,
                    formula, (long long)found, (long long)most);
    return FANFOLD_OK;
}

static int agrees(const fanfold_kernel *kernel, int32_t arch, const int64_t *wanted, int32_t count)
{
    if (kernel->arch != arch)
        return 0;
    for (int32_t i = 0; i < count; i++)
        if (kernel->choices[i] != wanted[i])
            return 0;
    return 1;
}

static void append_value(char *text, size_t room, const choice *asked, int64_t value)
{
    size_t used = strlen(text);
    const char *comma = used > 0 ? ", " : "";
    if (asked->words != NULL && value >= 0 && value < asked->word_count)
        snprintf(text + used, room - used, "%s%s", comma, asked->words[value]);
    else
        snprintf(text + used, room - used, "%s%lld", comma, (long long)value);
}

/* The first choice that no kernel with the choices before it has, what was asked for and what there is. */
static int none_agrees(const char *function, const fanfold_kernel *kernels, int32_t count, int32_t arch,
                       const choice *asked, const int64_t *wanted, int32_t choices, fanfold_error *error)
{
    char offered[240] = "", found[64] = "";
    int32_t at = 0, last = 0;
    for (at = 0; at < choices; at++) {
        int some = 0;
        for (int32_t i = 0; i < count && !some; i++)
            some = agrees(&kernels[i], arch, wanted, at + 1);
        if (!some)
            break;
    }
    append_value(found, sizeof found, &asked[at], wanted[at]);
    for (int32_t i = 0; i < count; i++) {
        int seen = !agrees(&kernels[i], arch, wanted, at);
        for (last = 0; last < i && !seen; last++)
            seen = agrees(&kernels[last], arch, wanted, at) && kernels[last].choices[at] == kernels[i].choices[at];
        if (!seen)
            append_value(offered, sizeof offered, &asked[at], kernels[i].choices[at]);
    }
    return fail(error, FANFOLD_NOT_EXPORTED, "%s: %s: found %s, exported for sm_%d: %s", function, asked[at].name, found,
                (int)arch, offered[0] != '\0' ? offered : "nothing");
}

static int choose(const char *function, const fanfold_kernel *kernels, int32_t count, int32_t arch, const choice *asked,
                  const int64_t *wanted, int32_t choices, const fanfold_kernel **kernel, fanfold_error *error)
{
    for (int32_t i = 0; i < count; i++)
        if (agrees(&kernels[i], arch, wanted, choices)) {
            *kernel = &kernels[i];
            return FANFOLD_OK;
        }
    return none_agrees(function, kernels, count, arch, asked, wanted, choices, error);
}

