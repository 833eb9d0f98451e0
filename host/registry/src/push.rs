use reqwest::Method;
use reqwest::header::LOCATION;

use crate::Problem;
use crate::digest::sha256;
use crate::manifest::{COMPONENT, Descriptor, Interfaces, MANIFEST, Manifest, component_config};
use crate::session::{Ask, Session};

const BYTES: &str = "application/octet-stream";

/// Upload the component under this tag; returns the digest of its manifest.
pub(crate) async fn component(
    session: &Session<'_>,
    tag: &str,
    bytes: &[u8],
    interfaces: &Interfaces,
) -> Result<String, Problem> {
    let layer = Descriptor::of(COMPONENT, bytes);
    let (config, document) = component_config(&layer, interfaces);
    session.put_blob("the component", bytes).await?;
    session.put_blob("its configuration", &document).await?;
    let manifest = Manifest::new(config, vec![layer]).to_bytes();
    session.put_manifest("its manifest", tag, &manifest).await?;
    Ok(sha256(&manifest))
}

impl Session<'_> {
    /// Upload bytes, unless the repository has them.
    pub(crate) async fn put_blob(&self, what: &str, bytes: &[u8]) -> Result<(), Problem> {
        let digest = sha256(bytes);
        self.attempts(async || {
            let url = self.url(&format!("blobs/{digest}"));
            let present =
                self.ask(&Ask { method: Method::HEAD, url, what, accept: None, body: None, limit: 0 }).await?;
            match present.status {
                200 => return Ok(()),
                404 => {}
                _ => return Err(self.refused(what, &present, "200 or 404")),
            }
            let url = self.url("blobs/uploads/");
            let body = Some((BYTES, Vec::new()));
            let begun =
                self.ask(&Ask { method: Method::POST, url: url.clone(), what, accept: None, body, limit: 0 }).await?;
            if begun.status != 202 {
                return Err(self.refused(what, &begun, "202"));
            }
            let location = begun.headers.get(LOCATION).and_then(|location| location.to_str().ok());
            let place = location.and_then(|location| url.join(location).ok());
            let mut place = place.filter(|place| place.scheme() == url.scheme()).ok_or_else(|| Problem::Redirect {
                what: what.to_owned(),
                reason: format!("the upload to no usable address, expected one that begins with {}", url.scheme()),
            })?;
            place.query_pairs_mut().append_pair("digest", &digest);
            let body = Some((BYTES, bytes.to_vec()));
            let done = self.ask(&Ask { method: Method::PUT, url: place, what, accept: None, body, limit: 0 }).await?;
            if done.status == 201 { Ok(()) } else { Err(self.refused(what, &done, "201")) }
        })
        .await
    }

    pub(crate) async fn put_manifest(&self, what: &str, tag: &str, manifest: &[u8]) -> Result<(), Problem> {
        self.attempts(async || {
            let url = self.url(&format!("manifests/{tag}"));
            let body = Some((MANIFEST, manifest.to_vec()));
            let done = self.ask(&Ask { method: Method::PUT, url, what, accept: None, body, limit: 0 }).await?;
            if done.status == 201 { Ok(()) } else { Err(self.refused(what, &done, "201")) }
        })
        .await
    }
}
