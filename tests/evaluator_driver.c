/* Evaluates the trials of a file on the problem in it, in arrays of just their size, for the sanitizers to watch.
 *
 * The file holds numbers of eight bytes: the problem's counts; for each of its arrays the number of bytes, and then
 * these; the number of trials, and of each the limit, the two numbers to beat, and the states, four bytes each.
 * Usage: evaluator_driver FILE. Prints a line for each trial: the verdict, and the outcome if there is one. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "evaluator.h"

Evaluator *memfit_evaluator_new(const Problem *problem);
void memfit_evaluator_free(Evaluator *e);
int64_t memfit_evaluate(Evaluator *e, Trial *trial);
void memfit_instructions(const Evaluator *e, Instruction *instructions);
void memfit_ways(const Evaluator *e, int32_t *ways);

enum { NUM_COUNTS = offsetof(Problem, touches) / 8, NUM_FIELDS = sizeof(Problem) / 8 };

static FILE *file;

static void read_bytes(void *to, size_t size)
{
    if (size && fread(to, 1, size, file) != size) {
        printf("the file is cut short\n");
        exit(2);
    }
}

static int64_t read_number(void)
{
    int64_t number;
    read_bytes(&number, sizeof number);
    return number;
}

int main(int argc, char **argv)
{
    if (argc != 2 || !(file = fopen(argv[1], "rb"))) {
        printf("usage: evaluator_driver FILE\n");
        return 2;
    }
    int64_t fields[NUM_FIELDS];
    for (int i = 0; i < NUM_FIELDS; i++) {
        fields[i] = read_number();
        if (i >= NUM_COUNTS) {
            size_t size = (size_t)fields[i];
            void *array = malloc(size);
            read_bytes(array, size);
            memcpy(&fields[i], &array, sizeof array);
        }
    }
    Problem problem;
    memcpy(&problem, fields, sizeof problem);
    Evaluator *e = memfit_evaluator_new(&problem);
    int32_t *states = malloc((size_t)problem.num_storages * sizeof *states);
    int32_t *ways = malloc((size_t)problem.num_choices * sizeof *ways);
    for (int64_t left = read_number(); left > 0; left--) {
        Trial trial = {.states = states, .is_changed = left % 2};
        trial.limit_bytes = read_number();
        trial.incumbent.violation_bytes = read_number();
        trial.incumbent.step_ps = read_number();
        read_bytes(states, (size_t)problem.num_storages * sizeof *states);
        int64_t verdict = memfit_evaluate(e, &trial);
        printf("%lld", (long long)verdict);
        if (verdict == EVALUATED) {
            Outcome *o = &trial.outcome;
            Instruction *instructions = malloc((size_t)o->num_instructions * sizeof *instructions);
            memfit_instructions(e, instructions);
            memfit_ways(e, ways);
            free(instructions);
            printf(" %lld %lld %lld %lld %lld %lld", (long long)o->peak_bytes, (long long)o->step_ps,
                   (long long)o->stall_ps, (long long)o->max_excess_bytes, (long long)o->sum_excess_bytes,
                   (long long)o->num_reruns);
        }
        printf("\n");
    }
    memfit_evaluator_free(e);
    free(states);
    free(ways);
    for (int i = NUM_COUNTS; i < NUM_FIELDS; i++) {
        void *array;
        memcpy(&array, &fields[i], sizeof array);
        free(array);
    }
    fclose(file);
    return 0;
}
