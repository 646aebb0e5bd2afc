//! A fixed array of zeros in memory of its own, in huge pages where it is large.
//!
//! A walk touches thousands of places at random; with pages of 4 KiB each of them would miss the processor's table of
//! pages as well as its caches.

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

const HUGE_PAGE_BYTES: usize = 2 << 20;

/// # Safety
/// All zero bytes are a value of the type, and it has no `Drop`.
pub unsafe trait Zeroable: Copy {}

pub struct Zeroed<T: Zeroable> {
    start: NonNull<T>,
    length: usize,
}

// SAFETY: it owns its elements, as a boxed slice does.
unsafe impl<T: Zeroable + Send> Send for Zeroed<T> {}
// SAFETY: as above; shared references only read.
unsafe impl<T: Zeroable + Sync> Sync for Zeroed<T> {}

impl<T: Zeroable> Zeroed<T> {
    pub fn new(length: usize) -> Self {
        let layout = Self::layout(length);
        if layout.size() == 0 {
            return Self { start: NonNull::dangling(), length };
        }
        // SAFETY: the layout has a size; what is not zeroed by the allocator is zeroed here.
        let start = unsafe {
            if layout.align() == HUGE_PAGE_BYTES {
                let start = alloc(layout);
                if !start.is_null() {
                    advise_huge(start, layout.size());
                    start.write_bytes(0, layout.size());
                }
                start
            } else {
                alloc_zeroed(layout)
            }
        };
        match NonNull::new(start.cast::<T>()) {
            Some(start) => Self { start, length },
            None => handle_alloc_error(layout),
        }
    }

    fn layout(length: usize) -> Layout {
        let layout = Layout::array::<T>(length).and_then(|layout| {
            let is_large = layout.size() >= HUGE_PAGE_BYTES;
            layout.align_to(if is_large { HUGE_PAGE_BYTES } else { layout.align() })
        });
        match layout {
            Ok(layout) => layout,
            Err(_) => panic!("an array of {length} elements is larger than memory"),
        }
    }
}

#[cfg(target_os = "linux")]
fn advise_huge(start: *mut u8, size: usize) {
    // SAFETY: the range was just allocated, begins at a page and is used as ordinary memory whatever the answer is.
    unsafe { libc::madvise(start.cast(), size, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise_huge(_: *mut u8, _: usize) {}

impl<T: Zeroable> Default for Zeroed<T> {
    fn default() -> Self {
        Self::new(0)
    }
}

impl<T: Zeroable> Drop for Zeroed<T> {
    fn drop(&mut self) {
        let layout = Self::layout(self.length);
        if layout.size() > 0 {
            // SAFETY: allocated in `new` with this layout.
            unsafe { dealloc(self.start.as_ptr().cast(), layout) }
        }
    }
}

impl<T: Zeroable> Deref for Zeroed<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `length` elements were allocated, and zeros are a value of `T`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl<T: Zeroable> DerefMut for Zeroed<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }
}
