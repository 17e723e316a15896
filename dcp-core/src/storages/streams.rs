//! Streams of listed objects.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;

use crate::error::StorageError;

/// Entries that are known already.
pub(crate) struct Known<T>(std::vec::IntoIter<Result<T, StorageError>>);

impl<T> From<Vec<Result<T, StorageError>>> for Known<T> {
    fn from(entries: Vec<Result<T, StorageError>>) -> Self {
        Self(entries.into_iter())
    }
}

impl<T> Unpin for Known<T> {}

impl<T> Stream for Known<T> {
    type Item = Result<T, StorageError>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(self.0.next())
    }
}

/// Entries of a stream, changed or left out.
pub(crate) struct FilterMap<S, F> {
    inner: S,
    map: F,
}

impl<S, F> FilterMap<S, F> {
    pub(crate) fn new(inner: S, map: F) -> Self {
        Self { inner, map }
    }
}

impl<T, U, S, F> Stream for FilterMap<S, F>
where
    S: Stream<Item = Result<T, StorageError>> + Unpin,
    F: FnMut(T) -> Option<U> + Unpin,
{
    type Item = Result<U, StorageError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            match Pin::new(&mut self.inner).poll_next(context) {
                Poll::Ready(Some(Ok(entry))) => {
                    if let Some(entry) = (self.map)(entry) {
                        return Poll::Ready(Some(Ok(entry)));
                    }
                }
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(error))),
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}
