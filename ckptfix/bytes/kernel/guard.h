/* A mapped file that shrinks while it is read raises SIGBUS. Here that ends the call with an error, and not the process. */

#pragma once

#include <setjmp.h>
#include <signal.h>
#include <stddef.h>

/* Where a call of this thread ends when its memory is gone. A handler of signals must not allocate what it looks at. */
static __thread sigjmp_buf *volatile guard __attribute__((tls_model("initial-exec")));
static struct sigaction before;
static int is_guarded;

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    if (guard)
        siglongjmp(*guard, 1);
    /* Not of ours: whoever was there before gets it, the default when the instruction is tried again. */
    if (before.sa_flags & SA_SIGINFO)
        before.sa_sigaction(number, info, context);
    else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
        before.sa_handler(number);
    else {
        sigaction(SIGBUS, &before, NULL);
        if (info->si_code <= 0)
            raise(number); /* somebody sent it: no instruction is tried again */
    }
}

/* Makes calls end with an error when their memory is gone. Returns whether that worked. */
int ckptfix_guard(void)
{
    if (__sync_lock_test_and_set(&is_guarded, 1))
        return 1; /* once: a handler that took itself for the one before it would call itself for ever */
    struct sigaction ours = {0};
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK; /* no signal is masked, so no mask has to be restored */
    sigemptyset(&ours.sa_mask);
    return sigaction(SIGBUS, &ours, &before) == 0;
}

/* From here on a call ends at `here` when its memory is gone: nothing is read before that holds. */
static inline void guard_with(sigjmp_buf *here)
{
    guard = here;
    __asm__ volatile("" ::: "memory");
}

static inline void unguard(void)
{
    __asm__ volatile("" ::: "memory");
    guard = NULL;
}
