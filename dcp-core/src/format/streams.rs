//! Streams of listed objects.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;

use crate::error::StorageError;
use crate::storage::{ObjectMeta, ObjectStream};

/// Objects that are known already.
pub(super) struct Objects(std::vec::IntoIter<Result<ObjectMeta, StorageError>>);

impl From<Vec<Result<ObjectMeta, StorageError>>> for Objects {
    fn from(objects: Vec<Result<ObjectMeta, StorageError>>) -> Self {
        Self(objects.into_iter())
    }
}

impl Stream for Objects {
    type Item = Result<ObjectMeta, StorageError>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(self.0.next())
    }
}

/// Objects of a stream, changed or left out.
pub(super) struct FilterMap<F> {
    inner: ObjectStream,
    map: F,
}

impl<F> FilterMap<F> {
    pub(super) fn new(inner: ObjectStream, map: F) -> Self {
        Self { inner, map }
    }
}

impl<F: FnMut(ObjectMeta) -> Option<ObjectMeta> + Unpin> Stream for FilterMap<F> {
    type Item = Result<ObjectMeta, StorageError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            match self.inner.as_mut().poll_next(context) {
                Poll::Ready(Some(Ok(meta))) => {
                    if let Some(meta) = (self.map)(meta) {
                        return Poll::Ready(Some(Ok(meta)));
                    }
                }
                other => return other,
            }
        }
    }
}
