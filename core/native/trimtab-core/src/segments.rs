//! Arrays of zeros that grow at their end and never move: segments of one size, cut from slabs in huge pages.
//!
//! A table that is looked up at random touches thousands of places; with pages of 4 KiB each of them would miss the
//! processor's table of pages as well as its caches. Where the system makes such a page only when it is first touched,
//! that takes milliseconds (on a virtual machine). So the next slab is always made ready beside, by a thread that does
//! nothing else and ends with it.

use std::marker::PhantomData;
use std::ops::{Index, IndexMut};
use std::ptr::NonNull;
use std::sync::Arc;
use std::thread::JoinHandle;

const SLAB_BYTES: usize = 2 << 20;
const PAGE_BYTES: usize = 4 << 10;
const SEGMENT_BYTES: usize = 64 << 10;

/// # Safety
/// All zero bytes are a value of the type, and it has no `Drop`. Its size is a power of two, at most `SEGMENT_BYTES`.
pub unsafe trait Zeroable: Copy + Send + Sync {}

/// Zeroed memory for a few segments; the segments keep it alive.
struct Slab(NonNull<u8>);

// SAFETY: it is memory that nobody else knows of; who may use which part is up to the segments.
unsafe impl Send for Slab {}
// SAFETY: as above.
unsafe impl Sync for Slab {}

#[cfg(target_os = "linux")]
impl Slab {
    fn new() -> Self {
        // SAFETY: a new anonymous mapping of twice the size; what is before and behind a huge page's edge in it is given
        // back at once. Advice may be refused.
        unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let start = libc::mmap(std::ptr::null_mut(), 2 * SLAB_BYTES, access, kind, -1, 0);
            let Some(start) = NonNull::new(start.cast::<u8>()).filter(|_| start != libc::MAP_FAILED) else {
                std::alloc::handle_alloc_error(Self::LAYOUT)
            };
            let before = start.as_ptr().align_offset(SLAB_BYTES);
            let slab = start.add(before);
            if before > 0 {
                libc::munmap(start.as_ptr().cast(), before);
            }
            libc::munmap(slab.as_ptr().add(SLAB_BYTES).cast(), SLAB_BYTES - before);
            libc::madvise(slab.as_ptr().cast(), SLAB_BYTES, libc::MADV_HUGEPAGE);
            Self(slab)
        }
    }
}

#[cfg(target_os = "linux")]
impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, whole, and no segment of it is left.
        unsafe { libc::munmap(self.0.as_ptr().cast(), SLAB_BYTES) };
    }
}

#[cfg(not(target_os = "linux"))]
impl Slab {
    fn new() -> Self {
        // SAFETY: the layout has a size.
        match NonNull::new(unsafe { std::alloc::alloc_zeroed(Self::LAYOUT) }) {
            Some(start) => Self(start),
            None => std::alloc::handle_alloc_error(Self::LAYOUT),
        }
    }
}

#[cfg(not(target_os = "linux"))]
impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and no segment of it is left.
        unsafe { std::alloc::dealloc(self.0.as_ptr(), Self::LAYOUT) };
    }
}

impl Slab {
    /// A slab whose pages are there.
    fn ready() -> Self {
        let slab = Self::new();
        for page in (0..SLAB_BYTES).step_by(PAGE_BYTES) {
            // SAFETY: within the slab, which is zeros already and nobody else's.
            unsafe { slab.0.as_ptr().add(page).write_volatile(0) };
        }
        slab
    }

    const LAYOUT: std::alloc::Layout = match std::alloc::Layout::from_size_align(SLAB_BYTES, PAGE_BYTES) {
        Ok(layout) => layout,
        Err(_) => panic!("both are powers of two"),
    };
}

/// Where segments come from.
#[derive(Default)]
pub struct Segments {
    slab: Option<Arc<Slab>>,
    used_bytes: usize,
    /// The one that comes next, from the second on.
    next: Option<JoinHandle<Slab>>,
}

impl Segments {
    fn take(&mut self) -> (Arc<Slab>, NonNull<u8>) {
        let slab = match &self.slab {
            Some(slab) if self.used_bytes < SLAB_BYTES => Arc::clone(slab),
            _ => self.open_slab(),
        };
        // SAFETY: a segment's size divides a slab's, so a whole one is left.
        let start = unsafe { slab.0.add(self.used_bytes) };
        self.used_bytes += SEGMENT_BYTES;
        (slab, start)
    }

    fn open_slab(&mut self) -> Arc<Slab> {
        let is_first = self.slab.is_none();
        let ready = self.next.take().and_then(|next| next.join().ok());
        if !is_first {
            self.next = std::thread::Builder::new().name("trimtab-slab".into()).spawn(Slab::ready).ok();
        }
        self.used_bytes = 0;
        Arc::clone(self.slab.insert(Arc::new(ready.unwrap_or_else(Slab::new))))
    }
}

/// An array of zeros to begin with. Indexing beyond its length panics, at the latest at its last segment's end.
pub struct Segmented<T: Zeroable> {
    starts: Vec<NonNull<T>>,
    slabs: Vec<Arc<Slab>>,
    of: PhantomData<T>,
}

// SAFETY: it owns its elements.
unsafe impl<T: Zeroable> Send for Segmented<T> {}
// SAFETY: shared references only read.
unsafe impl<T: Zeroable> Sync for Segmented<T> {}

impl<T: Zeroable> Default for Segmented<T> {
    fn default() -> Self {
        Self { starts: Vec::new(), slabs: Vec::new(), of: PhantomData }
    }
}

impl<T: Zeroable> Segmented<T> {
    const PER_SEGMENT: usize = {
        assert!(size_of::<T>().is_power_of_two() && size_of::<T>() <= SEGMENT_BYTES && align_of::<T>() <= 4096);
        SEGMENT_BYTES / size_of::<T>()
    };

    pub fn is_empty(&self) -> bool {
        self.starts.is_empty()
    }

    /// Room for at least `length` elements.
    pub fn extend_to(&mut self, length: usize, from: &mut Segments) {
        while self.starts.len() * Self::PER_SEGMENT < length {
            let (slab, start) = from.take();
            self.starts.push(start.cast());
            self.slabs.push(slab);
        }
    }

    pub fn bytes(&self) -> usize {
        self.starts.len() * SEGMENT_BYTES
    }

    #[inline(always)]
    pub fn place(&self, at: usize) -> *const T {
        // SAFETY: the remainder is within the segment, which lives as long as `self`.
        unsafe { self.starts[at / Self::PER_SEGMENT].as_ptr().add(at % Self::PER_SEGMENT) }
    }
}

impl<T: Zeroable> Index<usize> for Segmented<T> {
    type Output = T;

    #[inline(always)]
    fn index(&self, at: usize) -> &T {
        // SAFETY: a place of ours; zeros are a value of `T`.
        unsafe { &*self.place(at) }
    }
}

impl<T: Zeroable> IndexMut<usize> for Segmented<T> {
    #[inline(always)]
    fn index_mut(&mut self, at: usize) -> &mut T {
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { &mut *self.place(at).cast_mut() }
    }
}
