/* Copies that go past the caches.
 *
 * An ordinary copy reads every cache line that it is about to write, a third of all traffic. What is copied into an image, or out
 * of one, is gigabytes that nobody reads again soon, so it is written straight to memory. Four pages at a time, because memory is
 * quickest when several of its rows are open. Lists of copies are done in one call, so that Python's lock is taken once for all.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* Where `twice` is set, `also` gets the very same bytes, and stays in the caches. */
ALWAYS_INLINE void copy_plainly(char *to, char *also, const char *from, size_t size, int twice)
{
    if (twice)
        from = memcpy(also, from, size);
    memmove(to, from, size);
}

#ifdef __SSE2__
#include <emmintrin.h>

enum { LINE = 64, PAGE = 4096, PAGES = 4 };

ALWAYS_INLINE void stream_line(char *to, char *also, const char *from, int twice)
{
    for (size_t n = 0; n < LINE; n += sizeof(__m128i)) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)(from + n));
        _mm_stream_si128((__m128i *)(to + n), bytes);
        if (twice)
            _mm_storeu_si128((__m128i *)(also + n), bytes);
    }
}

ALWAYS_INLINE void stream(char *to, char *also, const char *from, size_t size, int twice)
{
    size_t at = size < PAGE ? size : -(uintptr_t)to % LINE;
    copy_plainly(to, also, from, at, twice);
    for (; size - at >= PAGES * PAGE; at += PAGES * PAGE)
        for (size_t line = at; line < at + PAGE; line += LINE)
            for (size_t n = line; n < line + PAGES * PAGE; n += PAGE)
                stream_line(to + n, also + n, from + n, twice);
    for (; size - at >= LINE; at += LINE)
        stream_line(to + at, also + at, from + at, twice);
    copy_plainly(to + at, also + at, from + at, size - at, twice);
}

static void finish(void)
{
    _mm_sfence(); /* Whoever is told that the copy is done must see it. */
}
#else
ALWAYS_INLINE void stream(char *to, char *also, const char *from, size_t size, int twice)
{
    copy_plainly(to, also, from, size, twice);
}

static void finish(void)
{
}
#endif

void strata_copy(size_t count, char *const *to, const char *const *from, const size_t *sizes)
{
    for (size_t n = 0; n < count; n++)
        stream(to[n], to[n], from[n], sizes[n], 0);
    finish();
}

/* To the same offsets in two places. What is in the first place already is copied to the second alone. */
void strata_copy_twice(size_t count, char *to, char *also, const size_t *offsets, const char *const *from,
                       const size_t *sizes)
{
    for (size_t n = 0; n < count; n++)
        if (from[n] == to + offsets[n])
            memcpy(also + offsets[n], from[n], sizes[n]);
        else
            stream(to + offsets[n], also + offsets[n], from[n], sizes[n], 1);
    finish();
}
