// A browser starts no worker from a file, so that the search would not work in a site that is read from disk. There
// a hidden frame takes the worker's place: it loads the same script, and messages go to and fro in the same way.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.waiting = []; // messages that were sent before the script was there
      this.onmessage = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.addEventListener("load", () => this.start(String(new URL(address, document.baseURI))), { once: true });
      const append = () => document.body.append(this.frame);
      if (document.body) append();
      else addEventListener("DOMContentLoaded", append);
    }

    // What a worker has and a frame lacks: `importScripts`, and a `postMessage` that answers whoever made it.
    start(script) {
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.answer(data);
      inside.importScripts = (...scripts) => Promise.all(scripts.map((each) => this.load(String(new URL(each, script)))));
      this.load(script).then(() => {
        this.waiting.forEach((data) => this.send(data));
        this.waiting = null;
      });
    }

    load(script) {
      const inside = this.frame.contentDocument;
      return new Promise((done, failed) => {
        const element = inside.createElement("script");
        Object.assign(element, { src: script, onload: done, onerror: failed });
        inside.head.append(element);
      });
    }

    answer(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    }

    send(data) {
      const inside = this.frame.contentWindow;
      inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.send(data);
    }

    terminate() {
      this.frame.remove();
    }
  };
}
