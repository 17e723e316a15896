//! The double of Google Cloud Storage, through the fault proxy.
#![allow(clippy::unwrap_used, reason = "tests fail loudly")]

use std::io::Write as _;
use std::time::Duration;

use bytes::Bytes;
use dcp_conformance::http::{FaultProxy, FaultRule, GcsDouble, HttpFault};
use http_body_util::{BodyExt, Full};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;

type Outcome = Result<Response<Bytes>, Box<dyn std::error::Error>>;

/// Sends one request on a connection of its own, and reads the whole answer.
async fn send(endpoint: &str, request: &str, headers: &[(&str, &str)], body: &[u8]) -> Outcome {
    let (method, target) = request.split_once(' ').unwrap();
    let stream = tokio::net::TcpStream::connect(endpoint.strip_prefix("http://").unwrap()).await?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let mut built = Request::builder().method(method).uri(target).header("host", "bucket.example");
    for (name, value) in headers {
        built = built.header(*name, *value);
    }
    let answer = sender.send_request(built.body(Full::new(Bytes::copy_from_slice(body)))?).await?;
    let (parts, body) = answer.into_parts();
    Ok(Response::from_parts(parts, body.collect().await?.to_bytes()))
}

fn run(test: impl AsyncFnOnce(&GcsDouble, &FaultProxy)) {
    let double = GcsDouble::start(&["bucket"]).unwrap();
    let proxy = FaultProxy::start(&double.endpoint()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(test(&double, &proxy));
}

fn text(answer: &Response<Bytes>) -> &str {
    std::str::from_utf8(answer.body()).unwrap()
}

#[test]
fn requests_pass_the_proxy_as_they_are() {
    run(async |double, proxy| {
        let endpoint = proxy.endpoint();
        let mark = [("x-goog-meta-mark", "mine"), ("content-type", "text/plain")];
        let put = send(&endpoint, "PUT /bucket/a%2Fb%20c", &mark, b"0123456789").await.unwrap();
        let generation = put.headers()["x-goog-generation"].to_str().unwrap();
        let get =
            send(&endpoint, "GET /bucket/a/b%20c", &[("range", "bytes=2-4")], b"").await.unwrap();
        assert_eq!((get.status().as_u16(), text(&get)), (206, "234"));
        assert_eq!(get.headers()["content-range"], "bytes 2-4/10");
        assert_eq!(get.headers()["x-goog-generation"], generation);
        let head = send(&endpoint, "HEAD /bucket/a%2Fb%20c", &[], b"").await.unwrap();
        assert!(mark.iter().all(|(name, value)| head.headers()[*name] == *value));
        assert_eq!((head.headers()["content-length"].to_str().unwrap(), text(&head)), ("10", ""));
        assert_eq!(double.exchanges(), proxy.exchanges());
        assert_eq!((proxy.traffic().requests, proxy.traffic().received_bytes), (3, 3));
        assert_eq!(proxy.traffic().sent_bytes, 10);
    });
}

#[test]
fn conditions_listings_and_uploads_are_answered() {
    run(async |double, proxy| {
        let endpoint = proxy.endpoint();
        let create = [("x-goog-if-generation-match", "0")];
        for (expected, key) in [(200, "run/a"), (412, "run/a"), (200, "run/b/1"), (200, "run/b/2")]
        {
            let put = send(&endpoint, &format!("PUT /bucket/{key}"), &create, b"x").await.unwrap();
            assert_eq!(put.status().as_u16(), expected, "{key}");
        }
        let list = "GET /bucket?list-type=2&prefix=run%2F&delimiter=%2F&max-keys=1";
        let page = send(&endpoint, list, &[], b"").await.unwrap();
        assert!(text(&page).contains("<NextContinuationToken>run/a</NextContinuationToken>"));
        let next = format!("{list}&continuation-token=run%2Fa");
        let page = send(&endpoint, &next, &[], b"").await.unwrap();
        assert!(text(&page).contains("<CommonPrefixes><Prefix>run/b/</Prefix></CommonPrefixes>"));
        assert!(text(&page).contains("<IsTruncated>false</IsTruncated>"));

        let started = send(&endpoint, "POST /bucket/big?uploads", &[], b"").await.unwrap();
        let (_, id) = text(&started).split_once("<UploadId>").unwrap();
        let (id, _) = id.split_once("</UploadId>").unwrap();
        let part = format!("PUT /bucket/big?partNumber=1&uploadId={id}");
        let part = send(&endpoint, &part, &[], b"parts").await.unwrap();
        let etag = part.headers()["etag"].to_str().unwrap();
        let uploads = send(&endpoint, "GET /bucket?uploads", &[], b"").await.unwrap();
        assert!(text(&uploads).contains(id));
        assert_eq!(double.unfinished_uploads(), 1);
        let parts = format!(
            "<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>{etag}</ETag></Part>\
             </CompleteMultipartUpload>"
        );
        let complete = format!("POST /bucket/big?uploadId={id}");
        let done = send(&endpoint, &complete, &[], parts.as_bytes()).await.unwrap();
        assert_eq!(done.status(), 200, "{}", text(&done));
        assert_eq!(double.unfinished_uploads(), 0);

        let missing = send(&endpoint, "GET /elsewhere/big", &[], b"").await.unwrap();
        assert!(missing.status() == 404 && text(&missing).contains("<Code>NoSuchBucket</Code>"));
        let deleted = send(&endpoint, "DELETE /bucket/big", &[], b"").await.unwrap();
        assert_eq!(deleted.status(), 204);
        let missing = send(&endpoint, "GET /bucket/big", &[], b"").await.unwrap();
        assert!(missing.status() == 404 && text(&missing).contains("<Code>NoSuchKey</Code>"));
    });
}

#[test]
fn the_server_has_applied_what_was_answered_with_a_reset() {
    run(async |_, proxy| {
        let (endpoint, create) = (proxy.endpoint(), [("x-goog-if-generation-match", "0")]);
        proxy.add(FaultRule::new(HttpFault::LoseAnswer).method("PUT").times(1));
        proxy.add(FaultRule::new(HttpFault::Reset).method("PUT").containing("/c").times(1));
        send(&endpoint, "PUT /bucket/k", &create, b"x").await.unwrap_err();
        let again = send(&endpoint, "PUT /bucket/k", &create, b"x").await.unwrap();
        assert_eq!(again.status(), 412);
        send(&endpoint, "PUT /bucket/c", &create, b"x").await.unwrap_err();
        let again = send(&endpoint, "PUT /bucket/c", &create, b"x").await.unwrap();
        assert_eq!(again.status(), 200, "the server has not seen the first");
        assert_eq!((proxy.traffic().requests, proxy.traffic().faults), (4, 2));
    });
}

#[test]
fn bodies_are_cut_with_the_connection_or_in_good_order() {
    run(async |_, proxy| {
        let endpoint = proxy.endpoint();
        let body: Vec<u8> = (0..100_000).map(|n| n as u8).collect();
        send(&endpoint, "PUT /bucket/k", &[], &body).await.unwrap();
        for after in [0, 1, 99_999] {
            let rule = FaultRule::new(HttpFault::Truncate { after }).times(1);
            proxy.add(rule);
            proxy.clear();
            send(&endpoint, "GET /bucket/k", &[], b"").await.unwrap_err();
            assert_eq!(proxy.traffic().received_bytes, after);
        }
        proxy.add(FaultRule::new(HttpFault::Truncate { after: 100_000 }).times(1));
        assert_eq!(*send(&endpoint, "GET /bucket/k", &[], b"").await.unwrap().body(), body);

        proxy.add(FaultRule::new(HttpFault::Shorten { by: 7 }));
        let short = send(&endpoint, "GET /bucket/k", &[], b"").await.unwrap();
        assert_eq!(short.headers()["content-length"], "99993");
        assert_eq!(*short.body(), body[..99_993]);
        let head = send(&endpoint, "HEAD /bucket/k", &[], b"").await.unwrap();
        assert_eq!(head.headers()["content-length"], "100000");

        proxy.calm();
        proxy.add(FaultRule::new(HttpFault::Slow { delay: Duration::from_millis(1) }));
        assert_eq!(*send(&endpoint, "GET /bucket/k", &[], b"").await.unwrap().body(), body);
    });
}

#[test]
fn answers_are_made_up() {
    run(async |double, proxy| {
        let endpoint = proxy.endpoint();
        for fault in [HttpFault::slow_down(), HttpFault::too_many_requests(3)] {
            proxy.add(FaultRule::new(fault).times(1));
        }
        let slow = send(&endpoint, "PUT /bucket/k", &[], b"x").await.unwrap();
        assert!(slow.status() == 503 && text(&slow).contains("<Code>SlowDown</Code>"));
        let many = send(&endpoint, "PUT /bucket/k", &[], b"x").await.unwrap();
        assert_eq!(
            (many.status().as_u16(), &many.headers()["retry-after"]),
            (429, &"3".parse().unwrap())
        );
        assert_eq!(double.traffic().requests, 0);
    });
}

#[test]
fn a_stalled_request_has_reached_the_server() {
    run(async |double, proxy| {
        proxy.add(FaultRule::new(HttpFault::Stall));
        let address = proxy.endpoint();
        let address = address.strip_prefix("http://").unwrap();
        let mut client = std::net::TcpStream::connect(address).unwrap();
        client
            .write_all(b"PUT /bucket/k HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n\r\nx")
            .unwrap();
        assert!(proxy.wait_for_stall());
        assert_eq!(double.exchanges()[0].status, Some(200));
        assert_eq!(proxy.exchanges()[0].status, None);
        proxy.calm();
        let get = send(&proxy.endpoint(), "GET /bucket/k", &[], b"").await.unwrap();
        assert_eq!(text(&get), "x");
    });
}
