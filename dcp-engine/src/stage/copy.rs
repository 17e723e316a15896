//! Copying elements on several threads.

use std::sync::{Mutex, PoisonError};
use std::thread;

use bytes::Bytes;
use dcp_core::TensorView;
use dcp_core::memory::copy_streaming;

/// Bytes that a thread copies at a time.
const SEGMENT: usize = 4 << 20;
/// Copies of at least so many bytes in all go past the caches, which they would only empty.
const STREAMED: usize = 32 << 20;

/// The elements of one view, and the memory that receives them in row-major order.
pub(super) struct CopyJob<'a> {
    view: TensorView,
    memory: Bytes,
    target: &'a mut [u8],
}

/// A part of a job.
enum Part<'a> {
    Contiguous { source: Bytes, target: &'a mut [u8], streamed: bool },
    Runs(CopyJob<'a>),
}

impl<'a> CopyJob<'a> {
    /// `memory` is all of the view's memory; `target` has the length of the view's elements.
    pub(super) fn new(view: TensorView, memory: Bytes, target: &'a mut [u8]) -> Self {
        Self { view, memory, target }
    }

    fn divide(self, streamed: bool, parts: &mut Vec<Part<'a>>) {
        if !self.view.is_contiguous() {
            return parts.push(Part::Runs(self));
        }
        let start = self.view.runs().next().map_or(0, |run| run.start);
        let source = self.memory.slice(start..start + self.target.len());
        for (number, target) in self.target.chunks_mut(SEGMENT).enumerate() {
            let start = number * SEGMENT;
            let source = source.slice(start..start + target.len());
            parts.push(Part::Contiguous { source, target, streamed });
        }
    }
}

impl Part<'_> {
    fn copy(self) {
        match self {
            Part::Contiguous { source, target, streamed: true } => copy_streaming(target, &source),
            Part::Contiguous { source, target, .. } => target.copy_from_slice(&source),
            Part::Runs(CopyJob { view, memory, target }) => {
                let mut rest = target;
                for run in view.runs() {
                    let (part, after) = rest.split_at_mut(run.len());
                    part.copy_from_slice(&memory[run]);
                    rest = after;
                }
            }
        }
    }
}

/// Does all jobs on up to `threads` threads, this one included.
pub(super) fn copy_all(jobs: Vec<CopyJob<'_>>, threads: usize) {
    let mut parts = Vec::new();
    let streamed = jobs.iter().map(|job| job.target.len()).sum::<usize>() >= STREAMED;
    jobs.into_iter().for_each(|job| job.divide(streamed, &mut parts));
    let helpers = threads.min(parts.len()).saturating_sub(1);
    let small = parts.len() <= 1;
    let parts = Mutex::new(parts.into_iter());
    let work = || {
        loop {
            let part = parts.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(part) = part else { return };
            part.copy();
        }
    };
    if small || helpers == 0 {
        return work();
    }
    thread::scope(|scope| {
        for _ in 0..helpers {
            // Without another thread this one copies the rest.
            let _ = thread::Builder::new().name("dcp-copy".into()).spawn_scoped(scope, work);
        }
        work();
    });
}
