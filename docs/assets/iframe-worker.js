// A page that was opened from the disk may not start a Worker, and the search runs in one. There,
// a hidden frame takes its place, with the same interface. Pages from a server keep the Worker.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      this.scope.document.open();
      this.scope.document.write("<!doctype html><title>search</title><body>");
      this.scope.document.close();
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.scope.document.createElement("script");
      script.src = url;
      this.loaded = new Promise((resolve) => script.addEventListener("load", resolve));
      this.scope.document.body.append(script);
    }

    postMessage(data) {
      this.loaded.then(() =>
        this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data })),
      );
    }

    terminate() {
      this.scope.frameElement.remove();
    }
  };
}
