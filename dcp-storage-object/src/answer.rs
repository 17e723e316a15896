//! Bounds of a server's answers.

use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use http_body_util::{BodyExt, Limited};
use object_store::client::{HttpError, HttpRequest, HttpResponse, HttpResponseBody};

use crate::object_read::ObjectRead;
use crate::refused::Refused;
use crate::strange_keys;

/// The longest answer that is read whole, in bytes: a list of 5000 blobs whose names have 1024
/// characters, each of them escaped.
const WHOLE_BYTES_MAX: usize = 64 << 20;

/// The bytes of an error's body that are read. A message is at its beginning.
const ERROR_BYTES_MAX: usize = 64 << 10;

/// The longest wait for the body of an error.
const ERROR_TIME_MAX: Duration = Duration::from_secs(5);

/// An answer whose body has a bound: the beginning of an error, and the longest list of any
/// provider. The body of an object is read piece by piece, up to the bytes that are needed.
pub(crate) async fn bounded(
    answer: HttpResponse,
    subject: Subject,
) -> Result<HttpResponse, HttpError> {
    let (parts, body) = answer.into_parts();
    if parts.status.is_client_error() || parts.status.is_server_error() {
        let text = beginning(body.bytes_stream()).await;
        return Ok(HttpResponse::from_parts(parts, text.into()));
    }
    if subject == Subject::Object {
        return Ok(HttpResponse::from_parts(parts, body));
    }
    let body =
        Limited::new(body, WHOLE_BYTES_MAX).map_err(|error| match error.downcast::<HttpError>() {
            Ok(error) => *error,
            Err(_) => Refused::error(format!("the answer has more than {WHOLE_BYTES_MAX} bytes")),
        });
    let body = HttpResponseBody::new(body);
    if subject != Subject::List {
        return Ok(HttpResponse::from_parts(parts, body));
    }
    let list = body.bytes().await?;
    let shorter = std::str::from_utf8(&list).ok().and_then(strange_keys::without);
    let list = shorter.map_or(list, Bytes::from);
    Ok(HttpResponse::from_parts(parts, list.into()))
}

/// The subject of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Subject {
    /// An object, whose body is read piece by piece.
    Object,
    /// A list of objects.
    List,
    /// Something else.
    Other,
}

impl Subject {
    pub(crate) fn of(request: &HttpRequest) -> Self {
        let query = request.uri().query().unwrap_or_default();
        match request.extensions().get::<ObjectRead>() {
            Some(_) => Self::Object,
            None if query.contains("list-type=2") || query.contains("comp=list") => Self::List,
            None => Self::Other,
        }
    }
}

/// The beginning of the body of an error, as far as it comes in time.
async fn beginning(mut body: BoxStream<'static, Result<Bytes, HttpError>>) -> String {
    let mut read = Vec::new();
    let reading = async {
        while let Some(Ok(piece)) = body.next().await {
            let left = ERROR_BYTES_MAX - read.len();
            read.extend_from_slice(piece.get(..left).unwrap_or(&piece));
            if read.len() >= ERROR_BYTES_MAX {
                break;
            }
        }
    };
    // What came is the message.
    let _ = tokio::time::timeout(ERROR_TIME_MAX, reading).await;
    String::from_utf8_lossy(&read).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::stream;

    #[tokio::test(start_paused = true)]
    async fn an_error_has_the_beginning_of_its_body_however_long_or_slow() {
        let piece = || Ok(Bytes::from_static(b"\xffdenied"));
        let endless = stream::repeat_with(piece).boxed();
        let text = beginning(endless).await;
        assert!(text.starts_with("\u{fffd}denied") && text.len() < 2 * ERROR_BYTES_MAX);
        let slow = stream::iter([piece()]).chain(stream::pending()).boxed();
        assert_eq!(beginning(slow).await, "\u{fffd}denied");
        let slow = stream::repeat(()).then(|()| async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            Ok(Bytes::from_static(b"x"))
        });
        assert!((3..=6).contains(&beginning(slow.boxed()).await.len()));
        let broken = stream::iter([piece(), Err(Refused::error("broken")), piece()]).boxed();
        assert_eq!(beginning(broken).await, "\u{fffd}denied");
    }
}
