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
    Contiguous(Bytes, &'a mut [u8]),
    Runs(CopyJob<'a>),
}

impl<'a> CopyJob<'a> {
    /// `memory` is all of the view's memory; `target` has the length of the view's elements.
    pub(super) fn new(view: TensorView, memory: Bytes, target: &'a mut [u8]) -> Self {
        Self { view, memory, target }
    }

    fn divide(self, parts: &mut Vec<Part<'a>>) {
        if !self.view.is_contiguous() {
            return parts.push(Part::Runs(self));
        }
        let start = self.view.runs().next().map_or(0, |run| run.start);
        let source = self.memory.slice(start..start + self.target.len());
        for (number, target) in self.target.chunks_mut(SEGMENT).enumerate() {
            let start = number * SEGMENT;
            parts.push(Part::Contiguous(source.slice(start..start + target.len()), target));
        }
    }
}

impl Part<'_> {
    fn copy(self, streamed: bool) {
        match self {
            Part::Contiguous(source, target) if streamed => copy_streaming(target, &source),
            Part::Contiguous(source, target) => target.copy_from_slice(&source),
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
    jobs.into_iter().for_each(|job| job.divide(&mut parts));
    let helpers = threads.min(parts.len()).saturating_sub(1);
    let small = parts.len() <= 1;
    let parts = Mutex::new(parts.into_iter());
    let work = || {
        loop {
            let part = parts.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(part) = part else { return };
            part.copy(streamed);
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

#[cfg(test)]
mod tests {
    use dcp_core::{DType, Tensor};

    use super::*;

    #[test]
    fn a_copy_past_the_caches_has_all_bytes_at_any_place() {
        let len = STREAMED / 3 + 5;
        let bytes: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
        let tensor = Tensor::replicated(DType::UInt8, [len as u64], bytes.clone()).unwrap();
        let view = tensor.shards()[0].view().unwrap().clone();
        let memory = Bytes::from(bytes.clone());
        let mut target = vec![0; 3 * len + 1];
        let targets = target[1..].chunks_mut(len);
        let jobs = targets.map(|target| CopyJob::new(view.clone(), memory.clone(), target));
        copy_all(jobs.collect(), 2);
        assert_eq!(target[0], 0);
        assert!(target[1..].chunks(len).all(|copy| *copy == *bytes));
    }
}
