/* heap_map.h: files are mapped by copying them into a block of their size, around which
   AddressSanitizer has its zones. Included before femtotron_io.h's implementation. */

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static inline void *heap_map(int fd, size_t n)
{
    char *block = (char *)malloc(n);
    size_t at = 0;
    while (block != NULL && at < n) {
        const ssize_t got = read(fd, block + at, n - at); /* it was opened for this: from 0 */
        if (got <= 0) abort();
        at += (size_t)got;
    }
    return block != NULL ? block : MAP_FAILED;
}

#define mmap(address, n, protection, flags, fd, offset) heap_map(fd, n)
#define munmap(address, n) free(address)
